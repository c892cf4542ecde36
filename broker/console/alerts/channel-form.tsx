// The form of a channel: its service and address, and the other fields that the service needs.
import { client } from '../api-client.ts';
import { SelectField, TextField } from '../parts/form.tsx';
import { type Editing, FormDialog, useDraft } from '../parts/form-draft-and-dialog.tsx';

export type Channel = Awaited<ReturnType<typeof client.alertChannels.get>>;
type Type = Channel['type'];

interface Service {
  text: string;
  /** An example of a channel's address at this service. */
  example: string;
  hint: string;
  /** The field for the channel's secret; undefined if the address itself is the secret. */
  secret?: { label: string; hint: string };
}

export const services: Readonly<Record<Type, Service>> = {
  slack: {
    text: 'Slack',
    example: 'https://hooks.slack.com/services/…',
    hint: 'The URL of an incoming webhook of your Slack app',
  },
  discord: {
    text: 'Discord',
    example: 'https://discord.com/api/webhooks/…',
    hint: 'In Discord: Edit Channel > Integrations > Webhooks > Copy Webhook URL',
  },
  ntfy: {
    text: 'ntfy',
    example: 'https://ntfy.sh/my-topic',
    hint: 'The server and the topic that your phone subscribes to',
    secret: { label: 'Access token', hint: 'Only if the topic is protected' },
  },
  email: {
    text: 'E-mail',
    example: 'smtps://smtp.example.org:465',
    hint: 'Your mail server: smtps:// for TLS, smtp:// for STARTTLS',
    secret: { label: 'Password', hint: 'Only if the mail server needs a login' },
  },
  webhook: {
    text: 'Webhook',
    example: 'https://example.org/alerts',
    hint: 'The event alert.notified is posted to this URL as JSON',
    secret: { label: 'Secret', hint: 'Signs each delivery, so that the receiver can check it' },
  },
};

// The cast is safe: the record has exactly these keys.
const types = (Object.keys(services) as Type[]).map((name) => [name, services[name].text] as const);

const draftOf = (channel: Channel | undefined) => ({
  name: channel?.name ?? '',
  type: channel?.type ?? 'slack',
  url: channel?.url ?? '',
  secret: '',
  user: channel?.user ?? '',
  from: channel?.from ?? '',
  /** E-mail addresses of the recipients, separated by commas. */
  to: channel?.to?.join(', ') ?? '',
});
type Draft = ReturnType<typeof draftOf>;

async function save(draft: Draft, channel: Channel | undefined): Promise<string> {
  const { name, type, url, secret, user, from, to } = draft;
  const mail = {
    user: user || null,
    from,
    to: to.split(',').flatMap((address) => address.trim() || []),
  };
  const input = { name, ...(secret && { secret }), ...(type === 'email' && mail) };
  // The broker sends the address without its secret parts, so an unchanged address must not be sent back.
  const { id } = channel
    ? await client.alertChannels.update({
        channel_id: channel.id,
        ...input,
        ...(url !== channel.url && { url }),
      })
    : await client.alertChannels.create({ type, url, ...input });
  return id;
}

interface ChannelFormProps {
  /** The channel to change. If it is undefined, a channel is created. */
  channel?: Channel;
  close: () => void;
  saved: (id: string) => void;
}

export function ChannelForm({ channel, close, saved }: ChannelFormProps) {
  const form = useDraft(() => draftOf(channel));
  const { draft, bind } = form;
  const { name, type, url } = draft;
  const { example, hint, secret } = services[type];
  const present = secret?.label.toLowerCase();
  const isMail = type === 'email';
  return (
    <FormDialog
      title={channel ? `Change ${channel.name}` : 'New channel'}
      submit={channel ? 'Save' : 'Create'}
      close={close}
      run={() => save(draft, channel)}
      done={saved}
      disabled={!name || !url || (isMail && !(draft.from && draft.to))}
    >
      <TextField label="Name" {...bind('name')} placeholder="on call" required autoFocus />
      {!channel && <SelectField label="Service" {...bind('type')} options={types} />}
      <TextField
        label={isMail ? 'Mail server' : 'Address'}
        {...bind('url')}
        placeholder={example}
        hint={hint}
        required
      />
      {isMail && <MailFields {...form} />}
      {secret && (
        <TextField
          label={channel ? `New ${present}` : secret.label}
          {...bind('secret')}
          secret
          hint={channel ? `Leave the field empty to keep the current ${present}` : secret.hint}
        />
      )}
    </FormDialog>
  );
}

function MailFields({ bind }: Editing<Draft>) {
  return (
    <>
      <TextField label="From" {...bind('from')} placeholder="farhand@example.org" required />
      <TextField label="To" {...bind('to')} placeholder="ops@example.org, me@example.org" required />
      <TextField label="User" {...bind('user')} />
    </>
  );
}

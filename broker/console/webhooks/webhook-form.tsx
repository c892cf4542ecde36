// The form of a webhook: URL, events and secret.
import { client } from '../api-client.ts';
import { CheckFields, TextField } from '../parts/form.tsx';
import { FormDialog, useDraft } from '../parts/form-draft-and-dialog.tsx';

type Webhook = Awaited<ReturnType<typeof client.webhooks.get>>;
type Pattern = NonNullable<Parameters<typeof client.webhooks.create>[0]>['events'][number];

const choices: readonly (readonly [pattern: Pattern, text: string])[] = [
  ['machine.*', 'Machines: joined, online, offline'],
  ['command.failed', 'Failed commands'],
  ['command.*', 'All events of commands'],
  ['schedule.*', 'Schedules: completed and failed runs'],
  ['alert.*', 'Alerts: opened, acknowledged, resolved'],
  ['session.*', 'Terminals'],
  ['file.*', 'Files: uploaded, downloaded, deleted'],
  ['*', 'Everything'],
];

interface WebhookFormProps {
  webhook?: Webhook;
  close: () => void;
  saved: (id: string) => void;
}

export function WebhookForm({ webhook, close, saved }: WebhookFormProps) {
  const { draft, bind } = useDraft<{ url: string; secret: string; events: readonly string[] }>({
    url: webhook?.url ?? '',
    secret: '',
    events: webhook?.events ?? ['machine.*', 'command.failed'],
  });
  const { url, secret, events } = draft;
  const others = events.filter((pattern) => !choices.some(([known]) => known === pattern));
  const save = async (): Promise<string> => {
    // The cast is safe: the patterns are those above, or came from the broker.
    const patterns = [...events] as Pattern[];
    const input = { url, events: patterns, ...(secret && { secret }) };
    const { id } = webhook
      ? await client.webhooks.update({ webhook_id: webhook.id, ...input })
      : await client.webhooks.create(input);
    return id;
  };
  return (
    <FormDialog
      title={webhook ? 'Edit the webhook' : 'New webhook'}
      submit={webhook ? 'Save' : 'Create'}
      close={close}
      run={save}
      done={saved}
      disabled={!url || events.length === 0}
    >
      <TextField
        label="Address"
        {...bind('url')}
        placeholder="https://example.org/hooks"
        required
        autoFocus
      />
      <fieldset class="field">
        <legend>Events</legend>
        <CheckFields
          options={[...choices, ...others.map((pattern) => [pattern, pattern] as const)]}
          {...bind('events')}
        />
      </fieldset>
      <TextField
        label={webhook ? 'New secret' : 'Secret'}
        {...bind('secret')}
        secret
        hint={`Signs each delivery, so that the receiver can check it${webhook ? '; leave the field empty to keep the current secret' : ''}`}
      />
    </FormDialog>
  );
}

// The form of a webhook: URL, events and secret.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { CheckFields, TextField } from '../parts/form.tsx';
import { FormDialog } from '../parts/form-dialog.tsx';

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
  const [url, setUrl] = useState(webhook?.url ?? '');
  const [secret, setSecret] = useState('');
  const [events, setEvents] = useState<readonly string[]>(webhook?.events ?? ['machine.*', 'command.failed']);
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
        value={url}
        change={setUrl}
        placeholder="https://example.org/hooks"
        required
        autoFocus
      />
      <fieldset class="field">
        <legend>Events</legend>
        <CheckFields
          options={[...choices, ...others.map((pattern) => [pattern, pattern] as const)]}
          value={events}
          change={setEvents}
        />
      </fieldset>
      <TextField
        label={webhook ? 'New secret' : 'Secret'}
        value={secret}
        change={setSecret}
        secret
        hint={`Signs each delivery, so that the receiver can check it${webhook ? '; leave the field empty to keep the present secret' : ''}`}
      />
    </FormDialog>
  );
}

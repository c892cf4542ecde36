// The dialog that sends a webhook the events that it has missed since a chosen time.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { SelectField } from '../parts/form.tsx';
import { FormDialog } from '../parts/form-draft-and-dialog.tsx';
import { say } from '../parts/toasts.tsx';
import { hourMs, now } from '../timers.ts';

interface SendMissedProps {
  webhook: string;
  close: () => void;
  changed: () => void;
}

export function SendMissed({ webhook, close, changed }: SendMissedProps) {
  const [hours, setHours] = useState('24');
  const run = async (): Promise<void> => {
    const since = new Date(now() - Number(hours) * hourMs).toISOString();
    const { redelivered } = await client.webhooks.redeliverSince({ webhook_id: webhook, since });
    say(redelivered === 0 ? 'Nothing was missed' : `Deliveries that are sent again: ${redelivered}`);
  };
  return (
    <FormDialog title="Send missed events" submit="Send again" close={close} run={run} done={changed}>
      <SelectField
        label="Events of the last"
        value={hours}
        change={setHours}
        options={[
          ['1', 'hour'],
          ['24', '24 hours'],
          ['72', '3 days'],
        ]}
        hint="Delivered events are not sent again"
      />
    </FormDialog>
  );
}

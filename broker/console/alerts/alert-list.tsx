// A list of alerts, and the dialog that acknowledges one.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { may } from '../login-state.ts';
import { MachineLink } from '../machines/names.tsx';
import { Button } from '../parts/button.tsx';
import { TextField } from '../parts/form.tsx';
import { FormDialog } from '../parts/form-draft-and-dialog.tsx';
import { Ago, State } from '../parts/small-components.tsx';
import { actions, type Column, List, twoLines } from '../parts/table-and-paged-list.tsx';
import { to } from '../router.ts';

export type Alert = Awaited<ReturnType<typeof client.alerts.list>>['items'][number];

interface AlertListProps {
  items: readonly Alert[];
  reload: () => void;
}

export function AlertList({ items, reload }: AlertListProps) {
  const [asking, setAsking] = useState<Alert | undefined>(undefined);
  return (
    <>
      <List label="Alerts" columns={columnsOf(setAsking)} items={items} />
      {asking && <Acknowledge alert={asking} close={() => setAsking(undefined)} done={reload} />}
    </>
  );
}

const columnsOf = (acknowledge: (alert: Alert) => void): Column<Alert>[] => [
  ['Status', ({ status }) => <State of={status} />],
  twoLines(
    'Alert',
    ({ message }) => <span>{message}</span>,
    (alert) => detailsOf(alert).join(' · '),
  ),
  ['About', (alert) => <Subject alert={alert} />],
  [
    'Since',
    ({ created_at, resolved_at }) => (
      <>
        <Ago at={created_at} />
        {resolved_at !== null && (
          <>
            , until <Ago at={resolved_at} />
          </>
        )}
      </>
    ),
    'muted',
  ],
  [
    actions,
    (alert) =>
      alert.status === 'open' &&
      may('machines:write') && (
        <Button
          text="Acknowledge"
          aria-label={`Acknowledge: ${alert.message}`}
          press={() => acknowledge(alert)}
        />
      ),
  ],
];

function detailsOf({ name, note, repeats, reason }: Alert): string[] {
  return [
    name,
    ...(repeats > 0 ? [`repeated ${repeats === 1 ? 'once' : `${repeats} times`}`] : []),
    ...(note ? [note] : []),
    ...(reason && reason !== 'recovered' ? [reason.replaceAll('_', ' ')] : []),
  ];
}

/** Draws the subject of an alert: a link to its page, or a text if it has no page. */
function Subject({ alert: { kind, subject, machine_id } }: { alert: Alert }) {
  if (kind === 'schedule' && may('schedules:read'))
    return <a href={to('/schedules', subject)}>its schedule</a>;
  if (machine_id !== null) return <MachineLink id={machine_id} />;
  if (kind === 'key' && may('admin')) return <a href={to('/keys')}>API keys</a>;
  return <span class="muted">the broker</span>;
}

interface AcknowledgeProps {
  alert: Alert;
  close: () => void;
  done: () => void;
}

function Acknowledge({ alert, close, done }: AcknowledgeProps) {
  const [note, setNote] = useState('');
  return (
    <FormDialog
      title="Acknowledge the alert"
      submit="Acknowledge"
      close={close}
      run={() => client.alerts.acknowledge({ alert_id: alert.id, acknowledged: true, ...(note && { note }) })}
      done={done}
    >
      <p>{alert.message}</p>
      <TextField
        label="Note"
        value={note}
        change={setNote}
        placeholder="The provider is repairing it"
        hint="Other users see the note in the list. Channels do not repeat an acknowledged alert; they report only its end"
        autoFocus
      />
    </FormDialog>
  );
}

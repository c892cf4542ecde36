// Notices on the page of a machine: its open alerts, and the maintenance window that it is in.
import { client } from '../api-client.ts';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { Ago } from '../parts/small-components.tsx';
import { useData } from '../parts/use-data.ts';
import { to } from '../router.ts';
import { clock } from '../timers.ts';
import type { Window } from './maintenance-windows.tsx';

interface MachineNoticesProps {
  machine: { id: string; tags: readonly string[] };
}

const mostNamed = 3;
const mostWindows = 100;

export function MachineNotices({ machine: { id, tags } }: MachineNoticesProps) {
  const alerts = useData(
    (signal) => client.alerts.list({ machine_id: id, status: 'open', limit: mostNamed }, { signal }),
    [id],
    ({ type, data }) => type.startsWith('alert.') && data.machine_id === id,
  );
  const windows = useData(
    (signal) => client.maintenanceWindows.list({ limit: mostWindows }, { signal }),
    [id],
  );
  const covers = ({ active_until, machine_ids, tags: its }: Window): boolean =>
    active_until !== null &&
    Date.parse(active_until) > clock.value &&
    ((machine_ids === null && its === null) ||
      machine_ids?.includes(id) === true ||
      its?.some((tag) => tags.includes(tag)) === true);
  const more = (alerts.data?.total ?? 0) - mostNamed;
  return (
    <>
      {windows.data?.items.filter(covers).map((window) => (
        <p key={window.id} class="notice">
          <Icon of={icons.maintenance} />
          <span>
            In maintenance, <a href={to('/alerts', 'windows')}>{window.name}</a>: alerts are held back. The
            window ends <Ago at={window.active_until} />.
          </span>
        </p>
      ))}
      {alerts.data?.items.map(({ id: alert, message, created_at }) => (
        <p key={alert} class="notice bad">
          <Icon of={icons.alerts} />
          <span>
            {message}, opened <Ago at={created_at} />
          </span>
          <a href={to('/alerts')}>Alerts</a>
        </p>
      ))}
      {more > 0 && (
        <p class="muted">
          and {more} more <a href={to('/alerts')}>alerts</a>
        </p>
      )}
    </>
  );
}

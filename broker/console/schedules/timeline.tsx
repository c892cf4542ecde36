// What will run in the next 24 hours, hour by hour; a change of a time zone's clock is marked.
import { client } from '../client.ts';
import { nameOf } from '../machines/names.ts';
import { useData } from '../parts/use-data.ts';
import { to } from '../routes.ts';

const mostRuns = 1_000;
/** Runs of one schedule that are listed; a schedule for each minute would fill the page. */
const mostTimes = 6;

const shortTime = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', hour12: false });

export function Timeline() {
  const { data } = useData(
    (signal) => client.schedules.upcoming({ limit: mostRuns }, { signal }),
    [],
    ({ type }) => type.startsWith('schedule.'),
  );
  if (!data || data.runs.length === 0) return null;
  const rows = Map.groupBy(data.runs, ({ schedule_id }) => schedule_id);
  return (
    <section class="card">
      <h2>Next 24 hours</h2>
      <ul class="timeline">
        {[...rows.values()].map((runs) => {
          const [first] = runs;
          if (!first) return null;
          const turns = runs.some(({ utc_offset }) => utc_offset !== first.utc_offset);
          return (
            <li key={first.schedule_id}>
              <a class="cut" href={to('/schedules', first.schedule_id)}>
                {first.name}
              </a>
              <span class="muted cut">{nameOf(first.machine_id)}</span>
              <span class="number cut">
                {runs
                  .slice(0, mostTimes)
                  .map(({ at }) => shortTime.format(new Date(at)))
                  .join('  ')}
                {runs.length > mostTimes && <span class="muted"> and {runs.length - mostTimes} more</span>}
              </span>
              {turns && <span class="tag">clock changes</span>}
            </li>
          );
        })}
      </ul>
    </section>
  );
}

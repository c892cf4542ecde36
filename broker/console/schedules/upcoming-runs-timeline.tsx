// A timeline of the runs in the next day or week, with one line per schedule. If daylight saving time begins or ends
// between two runs, the second run is marked.
import { client } from '../api-client.ts';
import { fullTime } from '../format-times-and-sizes.ts';
import { nameOf } from '../machines/names.tsx';
import { Choice } from '../parts/small-components.tsx';
import { useData } from '../parts/use-data.ts';
import { choiceIn, to } from '../router.ts';
import { dayMs, now } from '../timers.ts';

type Upcoming = Awaited<ReturnType<typeof client.schedules.upcoming>>;
type Run = Upcoming['runs'][number];

const mostRuns = 1_000;
const spans = [
  ['1', '24 hours'],
  ['7', '7 days'],
] as const;
/** Number of labels below the lines. */
const labels = 6;

const hour = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', hour12: false });
const day = new Intl.DateTimeFormat(undefined, { weekday: 'short', day: 'numeric', month: 'short' });

export function Timeline() {
  const choice = choiceIn('days', spans);
  const days = choice.value;
  const { data } = useData(
    (signal) => {
      const until = new Date(now() + Number(days) * dayMs);
      return client.schedules.upcoming({ limit: mostRuns, until }, { signal });
    },
    [days],
    ({ type }) => type.startsWith('schedule.') || type.startsWith('command.'),
  );
  if (!data || (data.runs.length === 0 && days === '1')) return null;
  const rows = [...Map.groupBy(data.runs, ({ schedule_id }) => schedule_id).values()];
  return (
    <section class="card">
      <div class="card-head spread">
        <h2>Upcoming runs</h2>
        <Choice label="Period" {...choice} />
      </div>
      <ul class="timeline">
        {rows.map((runs) => (
          <Line key={runs[0]?.schedule_id} runs={runs} data={data} />
        ))}
      </ul>
      <Labels data={data} format={days === '1' ? hour : day} />
      {data.more && (
        <p class="hint timeline-more">
          There are more than {mostRuns.toLocaleString()} runs; only the first are drawn.
        </p>
      )}
    </section>
  );
}

/** Returns the position of an instant on the line, in percent. */
function percentAt(at: string, { from, until }: Upcoming): number {
  const start = Date.parse(from);
  return (100 * (Date.parse(at) - start)) / (Date.parse(until) - start);
}

const offsetText = (minutes: number): string => {
  const part = (value: number): string => String(value).padStart(2, '0');
  const size = Math.abs(minutes);
  return `UTC${minutes < 0 ? '−' : '+'}${part(Math.floor(size / 60))}:${part(size % 60)}`;
};

function Line({ runs, data }: { runs: readonly Run[]; data: Upcoming }) {
  const [first] = runs;
  if (!first) return null;
  const turns = runs.filter((run, index) => {
    const before = runs[index - 1];
    return before !== undefined && before.utc_offset !== run.utc_offset;
  });
  const times = runs.slice(0, 3).map(({ at }) => fullTime(at));
  const label = `${runs.length} runs of ${first.name}; next ${times.join(', ')}`;
  return (
    <li>
      <span class="cut">
        <a href={to('/schedules', first.schedule_id)}>{first.name}</a>{' '}
        <span class="muted">{first.machine_id ? nameOf(first.machine_id) : 'by tags'}</span>
      </span>
      <span class="track" role="img" aria-label={label}>
        {runs.map(({ at }) => (
          <i key={at} style={{ left: `${percentAt(at, data)}%` }} title={fullTime(at)} />
        ))}
      </span>
      {turns.map(({ at, utc_offset }) => (
        <span key={at} class="tag warn-text">
          clock changes to {offsetText(utc_offset)} before {fullTime(at)}
        </span>
      ))}
    </li>
  );
}

function Labels({ data, format }: { data: Upcoming; format: Intl.DateTimeFormat }) {
  const start = Date.parse(data.from);
  const step = (Date.parse(data.until) - start) / labels;
  return (
    <div class="timeline-labels muted" aria-hidden="true">
      {Array.from({ length: labels }, (_, index) => (
        <span key={index}>{index === 0 ? 'now' : format.format(new Date(start + index * step))}</span>
      ))}
    </div>
  );
}

// The page of events: new events as they happen, above the stored events.
import { useEffect, useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { type Happened, listen, lost } from '../live-updates.ts';
import { EventList } from '../parts/event-list.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { Choice, State } from '../parts/small-components.tsx';
import { LongList } from '../parts/table-and-paged-list.tsx';
import { choiceIn } from '../router.ts';

const families = [
  ['', 'All'],
  ['machine', 'Machines'],
  ['command', 'Commands'],
  ['session', 'Terminals'],
  ['schedule', 'Schedules'],
  ['alert', 'Alerts'],
  ['file', 'Files'],
] as const;

/** Maximum number of live events above the list. */
const mostLive = 500;

export function Events() {
  const choice = choiceIn('of', families);
  const family = choice.value;
  const [live, setLive] = useState<readonly Happened[]>([]);
  // After an interruption, the list of stored events is loaded again. The events in `live` are stored too, so `live` is
  // emptied.
  useEffect(
    () =>
      listen(
        ({ event }) => event && setLive((before) => [event, ...before].slice(0, mostLive)),
        () => setLive([]),
      ),
    [],
  );
  const matches = ({ type }: Happened): boolean => family === '' || type.startsWith(`${family}.`);
  return (
    <Page
      title="Events"
      beside={<State of={lost.value ? 'GRACE_PERIOD' : 'online'} text={lost.value ? 'not live' : 'live'} />}
    >
      <div class="filters">
        <Choice label="Kind" {...choice} />
      </div>
      <LongList
        read={(paging, signal) => client.events.list({ sort: '-created_at', ...paging }, { signal })}
        empty={
          <Empty icon={icons.events} title="Nothing has happened yet">
            <p>Machines that join, commands, terminals and changes of files appear here by themselves.</p>
          </Empty>
        }
      >
        {(items) => {
          const there = new Set(items.map(({ id }) => id));
          const all = [...live.filter(({ id }) => !there.has(id)), ...items].filter(matches);
          if (all.length === 0) return <p class="muted">None of the loaded events is of this kind.</p>;
          return <EventList items={all} withMachine />;
        }}
      </LongList>
    </Page>
  );
}

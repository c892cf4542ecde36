// The page of the audit log: who did what, on which machine, with which result.
import { client } from '../api-client.ts';
import { nameOf } from '../machines/names.ts';
import * as icons from '../parts/icons.ts';
import { Empty, Page } from '../parts/page.tsx';
import { List, LongList } from '../parts/paged-list.tsx';
import { SearchField } from '../parts/search-field.tsx';
import { Ago } from '../parts/small-components.tsx';
import { place, to } from '../router.ts';

type Entry = Awaited<ReturnType<typeof client.audit.list>>['items'][number];

/**
 * Returns the subject of a request as text: ids and other values. Leaves out the machine, because it has its own
 * column.
 */
function textOf({ what }: Entry): string {
  const parts = Object.entries(what).filter(([name]) => name !== 'machine_id');
  return parts
    .map(([name, value]) => `${name} ${typeof value === 'string' ? value : JSON.stringify(value)}`)
    .join(', ');
}

export function Audit() {
  const action = place.value.query.get('action') ?? '';
  return (
    <Page title="Audit log">
      <div class="filters">
        <SearchField label="Action, such as files.write" name="action" />
      </div>
      <LongList
        read={(paging, signal) => client.audit.list({ ...(action && { action }), ...paging }, { signal })}
        inputs={[action]}
        empty={
          <Empty
            icon={icons.audit}
            title={action ? `Nothing is recorded as ${action}` : 'Nothing is recorded yet'}
          >
            <p>Each call that changes or runs something is recorded here with its key and its address.</p>
          </Empty>
        }
      >
        {(items) => (
          <List
            label="Audit log"
            columns={['When', 'Who', 'Action', 'Machine', ['What', 'wide'], 'Result', 'Address']}
          >
            {items.map((entry) => (
              <AuditRow key={entry.id} entry={entry} />
            ))}
          </List>
        )}
      </LongList>
    </Page>
  );
}

function AuditRow({ entry }: { entry: Entry }) {
  return (
    <tr>
      <td class="muted">
        <Ago at={entry.at} />
      </td>
      <td>{entry.key_name}</td>
      <td>
        <code>{entry.action}</code>
      </td>
      <td>
        {entry.machine_id && <a href={to('/machines', entry.machine_id)}>{nameOf(entry.machine_id)}</a>}
      </td>
      <td class="wide">
        <span class="muted" title={textOf(entry)}>
          {textOf(entry)}
        </span>
      </td>
      <td class={entry.result === 'ok' ? 'muted' : 'bad-text'}>{entry.result}</td>
      <td class="muted">{entry.address || 'the broker’s machine'}</td>
    </tr>
  );
}

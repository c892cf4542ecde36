// The page of the audit log: who did what, on which machine, with which result.
import { client } from '../api-client.ts';
import { MachineFilter } from '../machines/machine-picker.tsx';
import { MachineLink } from '../machines/names.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { SearchField } from '../parts/search-field-in-url.tsx';
import { Ago } from '../parts/small-components.tsx';
import { type Column, List, LongList } from '../parts/table-and-paged-list.tsx';
import { place } from '../router.ts';

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

const columns: Column<Entry>[] = [
  ['When', ({ at }) => <Ago at={at} />, 'muted'],
  ['Who', ({ key_name }) => key_name],
  ['Action', ({ action }) => <code>{action}</code>],
  ['Machine', ({ machine_id }) => machine_id && <MachineLink id={machine_id} />],
  [
    'What',
    (entry) => (
      <span class="muted" title={textOf(entry)}>
        {textOf(entry)}
      </span>
    ),
    'wide',
  ],
  ['Result', ({ result }) => <span class={result === 'ok' ? 'muted' : 'bad-text'}>{result}</span>],
  ['Address', ({ address }) => address || 'the broker’s machine', 'muted'],
];

export function Audit() {
  const [action, key_name, machine_id] = ['action', 'key', 'machine'].map(
    (name) => place.value.query.get(name) ?? '',
  );
  const filter = {
    ...(action && { action }),
    ...(key_name && { key_name }),
    ...(machine_id && { machine_id }),
  };
  return (
    <Page title="Audit log">
      <div class="filters">
        <SearchField label="Action, such as files.write" name="action" />
        <SearchField label="Key, by its full name" name="key" />
        <MachineFilter />
      </div>
      <LongList
        read={(paging, signal) => client.audit.list({ ...filter, ...paging }, { signal })}
        inputs={[action, key_name, machine_id]}
        empty={
          <Empty
            icon={icons.audit}
            title={
              Object.keys(filter).length > 0 ? 'Nothing that matches is recorded' : 'Nothing is recorded yet'
            }
          >
            <p>Each call that changes or runs something is recorded here with its key and its address.</p>
          </Empty>
        }
      >
        {(items) => <List label="Audit log" columns={columns} items={items} />}
      </LongList>
    </Page>
  );
}

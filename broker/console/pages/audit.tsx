// The page of the audit log: who did what, on which machine, with which result.
import { client } from '../api-client.ts';
import { MachineLink } from '../machines/names.tsx';
import * as icons from '../parts/icons.ts';
import { Empty, Page } from '../parts/page.tsx';
import { type Column, List, LongList } from '../parts/paged-list.tsx';
import { SearchField } from '../parts/search-field.tsx';
import { Ago } from '../parts/small-components.tsx';
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
        {(items) => <List label="Audit log" columns={columns} items={items} />}
      </LongList>
    </Page>
  );
}

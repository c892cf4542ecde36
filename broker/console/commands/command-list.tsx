// A list of commands, newest first, used on the page of commands and on the page of a machine.
import { client } from '../api-client.ts';
import { durationText } from '../format-times-and-sizes.ts';
import { MachineLink } from '../machines/names.tsx';
import { RunButton } from '../parts/action-buttons.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { Ago, State } from '../parts/small-components.tsx';
import { type Column, List, LongList } from '../parts/table-and-paged-list.tsx';
import { choiceIn, to } from '../router.ts';
import { quoted } from './argv-text.ts';

export type CommandRecord = Awaited<ReturnType<typeof client.commands.get>>;

/** Returns the command line as a person would type it. */
export function commandLine({ command, args }: Pick<CommandRecord, 'command' | 'args'>): string {
  return [command, ...(args ?? []).map(quoted)].join(' ');
}

/**
 * Returns the URL of the form that runs a command again. The form then contains the line, folder and user of the
 * command. If `machine` is given, the form also contains that machine.
 */
export function runAgain(
  { cwd, user, ...line }: Pick<CommandRecord, 'command' | 'args' | 'cwd' | 'user'>,
  machine?: string,
): string {
  const query = new URLSearchParams({
    ...(machine !== undefined && { machine }),
    command: commandLine(line),
    ...(cwd && { cwd }),
    ...(user && { user }),
  });
  return `${to('/run')}?${query}`;
}

/** Returns how a command ended, in a word or two. */
export function outcome({ exit_code, signal }: Pick<CommandRecord, 'exit_code' | 'signal'>): string {
  if (signal) return signal;
  return exit_code === null ? '' : `exit ${exit_code}`;
}

/** The texts of all statuses. The type makes the compiler report each status that has no text here. */
const statusTexts: Readonly<Record<CommandRecord['status'], string>> = {
  queued: 'Queued',
  running: 'Running',
  completed: 'Completed',
  failed: 'Failed',
  timeout: 'Timed out',
  cancelled: 'Cancelled',
  expired: 'Expired',
  lost: 'Lost',
};
// The cast is safe: the record has exactly these keys.
const statuses = Object.entries(statusTexts) as [CommandRecord['status'], string][];

/** Returns the status by which the URL filters the list of commands, and the function that changes this status. */
export const statusChoice = () => choiceIn('status', [['', 'Any status'], ...statuses]);

interface CommandListProps {
  /** The status of the commands; empty for any. */
  status: CommandRecord['status'] | '';
  /** Id of the machine of the commands; empty for any. */
  machine: string;
  /** True if each row contains the name of the machine. */
  withMachine?: boolean;
}

export function CommandList({ status, machine, withMachine = false }: CommandListProps) {
  const isFiltered = status !== '' || (withMachine && machine !== '');
  return (
    <LongList
      read={(paging, signal) => {
        const filter = { ...(status && { status }), ...(machine && { machine_id: machine }) };
        return client.commands.list({ ...filter, ...paging }, { signal });
      }}
      inputs={[status, machine]}
      topic="commands"
      empty={
        <Empty
          icon={icons.command}
          title={isFiltered ? 'No command matches the filters' : 'No command has run yet'}
        >
          <p>Commands that you, a script or a schedule run are listed here with their output.</p>
          <RunButton query={machine && `?machine=${encodeURIComponent(machine)}`} />
        </Empty>
      }
    >
      {(items) => <List label="Commands" columns={columnsOf(withMachine)} items={items} />}
    </LongList>
  );
}

const columnsOf = (withMachine: boolean): (Column<CommandRecord> | false)[] => [
  [
    'Command',
    (command) => (
      <a class="mono" href={to('/commands', command.id)}>
        {commandLine(command)}
      </a>
    ),
    'wide',
  ],
  withMachine && ['Machine', ({ machine_id }) => <MachineLink id={machine_id} />],
  ['Status', ({ status }) => <State of={status} />],
  ['Result', outcome, 'muted'],
  ['Duration', ({ duration }) => duration !== null && durationText(duration), 'right number'],
  ['Created', ({ created_at }) => <Ago at={created_at} />, 'muted'],
];

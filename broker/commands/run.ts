// A command that has not ended, as the broker holds it in memory.
import type { Asking } from '../../shared/rpc.ts';
import type { Output } from './output.ts';
import type { Command } from './records.ts';

export interface Run {
  command: Command;
  readonly output: Output;
  /** Of the request that made it, for the logs of the machine. */
  requestId: string;
  /** It is on disk; before that nothing is done with it. */
  stored: boolean;
  /** Its agent is being asked about it. */
  following: boolean;
  /** How it ended, from the moment that is known; on disk a little later. */
  end: Command | undefined;
  /** Its end is on disk. */
  over: boolean;
  /** Who has asked for its end, for the log of the machine. */
  cancelledBy?: Asking | undefined;
  /** Its start is, or is about to be, in an event. */
  announced: boolean;
  /** The last input on its way; never rejects. */
  input: Promise<unknown>;
  cancelTimer: () => void;
  /** Called when it has started. */
  starters: Set<() => void>;
  /** Called when it is over. */
  waiters: Set<() => void>;
}

export function runOf(command: Command, output: Output, requestId: string): Run {
  return {
    command,
    output,
    requestId,
    stored: false,
    following: false,
    end: undefined,
    over: false,
    announced: command.started_at !== null,
    input: Promise.resolve(),
    cancelTimer: () => {},
    starters: new Set(),
    waiters: new Set(),
  };
}

/** Whether no agent has it yet. */
export function waits({ command, end }: Run): boolean {
  return command.journal_id === '' && !end;
}

/** Tells all who wait, also those whom nothing more will be told. */
export function wakeAll({ starters, waiters }: Run): void {
  for (const wake of [...starters, ...waiters]) wake();
}

/** The command with its output so far; `most` bytes of each stream. */
export async function current(run: Run, most?: number): Promise<Command> {
  if (run.over) return run.command;
  const { output } = run;
  const [stdout, stderr] = [await output.tail('stdout', most), await output.tail('stderr', most)];
  return run.over ? run.command : { ...run.command, stdout, stderr, ...output.extent() };
}

// A command that has not ended, as the broker holds it in memory.
import type { Output } from './output.ts';
import { tailOf } from './output.ts';
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
  /** Its start is, or is about to be, in an event. */
  announced: boolean;
  cancelTimer: () => void;
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
    cancelTimer: () => {},
    waiters: new Set(),
  };
}

/** Whether no agent has it yet. */
export function waits({ command, end }: Run): boolean {
  return command.journal_id === '' && !end;
}

/** The command with its output so far; `most` bytes of each stream. */
export async function current(run: Run, most?: number): Promise<Command> {
  if (run.over) return run.command;
  const { stdout, stderr } = run.output;
  const [out, err] = await Promise.all([tailOf(stdout, most), tailOf(stderr, most)]);
  return run.over ? run.command : { ...run.command, stdout: out, stderr: err, ...offsets(run) };
}

/** Where its output starts and ends, and what of it is in files. */
export function offsets({ output: { stdout, stderr } }: Run) {
  return {
    stdout_bytes: stdout.end,
    stderr_bytes: stderr.end,
    stdout_start: stdout.start,
    stderr_start: stderr.start,
    kept_bytes: stdout.size + stderr.size,
  };
}

// What an agent reports of a process: whether it can be so, and what it means for the record.
import type { ProcessEvent__Output } from '../../proto/types/farhand/agent/v1/ProcessEvent.ts';
import type { ProcessExit__Output } from '../../proto/types/farhand/agent/v1/ProcessExit.ts';
import { latestInstant } from '../../shared/clock.ts';
import type { Link } from '../presence/index.ts';
import type { Command, Status } from './records.ts';

/** How a command ends: the fields of its record that its end decides. */
export type End = Partial<Command> & { status: Status };

const outcomes: Readonly<Record<ProcessExit__Output['outcome'], Status>> = {
  PROCESS_OUTCOME_UNSPECIFIED: 'lost',
  PROCESS_OUTCOME_EXITED: 'completed',
  PROCESS_OUTCOME_NOT_STARTED: 'failed',
  PROCESS_OUTCOME_TIMEOUT: 'timeout',
  PROCESS_OUTCOME_CANCELLED: 'cancelled',
  PROCESS_OUTCOME_EXPIRED: 'expired',
  PROCESS_OUTCOME_LOST: 'lost',
};

/** What an exit means for the record. */
export function verdict(exit: ProcessExit__Output, command: Command, link: Link): End {
  // Seen to run, or given to another journal: whoever says that it never ran does not know.
  const unknown =
    exit.outcome === 'PROCESS_OUTCOME_EXPIRED' &&
    (command.started_at !== null || link.journalId !== command.journal_id);
  const ran = exit.outcome === 'PROCESS_OUTCOME_EXITED';
  const status = unknown ? 'lost' : ran && exit.exit_code !== 0 ? 'failed' : outcomes[exit.outcome];
  const timed = exit.started_at_ms > 0;
  return {
    status,
    exit_code: timed && status !== 'lost' ? exit.exit_code : null,
    signal: exit.signal || null,
    reason: unknown ? 'no_report' : exit.reason || null,
    ...(timed && { started_at: exit.started_at_ms }),
    ...(exit.finished_at_ms > 0 && { finished_at: exit.finished_at_ms }),
  };
}

/** Whether every time and count of a report can be one; an agent that says otherwise spoils only its own command. */
export function isSound({ started, output, exit }: ProcessEvent__Output): boolean {
  const times = [started?.started_at_ms ?? 0, exit?.started_at_ms ?? 0, exit?.finished_at_ms ?? 0];
  const reach = (output?.offset ?? 0) + (output?.data.length ?? 0);
  const counts = [exit?.stdout_bytes ?? 0, exit?.stderr_bytes ?? 0, reach];
  const within = (values: number[], most: number): boolean =>
    values.every((value) => value >= 0 && value <= most);
  const words = /^[\x20-\x7e]{0,32}$/.test(exit?.signal ?? '') && (exit?.reason.length ?? 0) <= 4096;
  return within(times, latestInstant) && within(counts, Number.MAX_SAFE_INTEGER) && words;
}

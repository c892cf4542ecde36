// The record of a command, the spec that is sent to the agent, and how the agent's exit report changes the record.
import type { ProcessEvent__Output } from '../../proto/types/farhand/agent/v1/ProcessEvent.ts';
import type { ProcessExit__Output } from '../../proto/types/farhand/agent/v1/ProcessExit.ts';
import type { ProcessSpec__Output } from '../../proto/types/farhand/agent/v1/ProcessSpec.ts';
import { withoutNul } from '../../shared/agent-rpcs.ts';
import type { Api, Input, Reply } from '../../shared/api/route-table.ts';
import type { BatchId, CommandId, KeyId, MachineId, ScheduleId } from '../../shared/api/shared-schemas.ts';
import { latestInstant, now } from '../../shared/clock.ts';
import { newId } from '../../shared/ids-and-secrets.ts';

export type CommandRecord = Reply<Api['commands']['get']>;
export type Status = CommandRecord['status'];

/** A command in the broker's memory. Its times are milliseconds since 1970, and its output is bytes. */
export interface Command extends Omit<CommandRecord, Serialized> {
  id: CommandId;
  machine_id: MachineId;
  requested_by: KeyId;
  schedule_id: ScheduleId | null;
  batch_id: BatchId | null;
  /** The last MiB of standard output, once the command has ended. */
  stdout: Buffer;
  stderr: Buffer;
  created_at: number;
  started_at: number | null;
  finished_at: number | null;
  /** Time until which the command may wait for its machine; null without `queue_for`. */
  queue_until: number | null;
  /**
   * Journal id that the agent had when it got the command; empty if no agent has the command. If the agent's journal id
   * is different now, the agent has lost its data.
   */
  journal_id: string;
  /** True once a request has cancelled the command. */
  cancel: boolean;
  /** Bytes of output in files on the broker's disk. */
  kept_bytes: number;
  /** Id of the data directory with the output files; null if the broker is the only one of its database. */
  output_directory: string | null;
}

/** Fields of the REST record that Command has in another form, or that are computed for REST only. */
type Serialized =
  | ('id' | 'machine_id' | 'requested_by' | 'schedule_id' | 'batch_id' | 'stdout' | 'stderr' | 'queued_until')
  | ('created_at' | 'started_at' | 'finished_at' | 'duration' | 'stdout_truncated' | 'stderr_truncated');

export type Batch = Pick<Command, 'command' | 'args' | 'cwd' | 'user' | 'created_at' | 'requested_by'> & {
  id: BatchId;
  concurrency: number | null;
  max_failures: number | null;
  /** True once a request has cancelled the batch. */
  cancel: boolean;
};

/** Limits and progress of a batch. */
export interface BatchProgress extends Pick<Batch, 'id' | 'concurrency' | 'max_failures' | 'cancel'> {
  /** True once all commands of the batch are stored. */
  isComplete: boolean;
  /** Number of the batch's commands that have not ended, on machines of this broker. */
  open: number;
  /**
   * Number of the commands in `open` that count against `concurrency`. Such a command may be at an agent, or is about
   * to expire because its machine is offline.
   */
  running: number;
  /** Number of the batch's commands that were running at other brokers when the database was last read. */
  elsewhere: number;
  /**
   * Number of commands that ended with a status other than completed. If there are several brokers, the number is read
   * from the database.
   */
  failures: number;
}

/** One status, the number of a batch's commands that have this status, and when the last of these commands ended. */
export type Tally = Pick<Command, 'status' | 'finished_at'> & { n: number };

/** The process that an agent starts, in the form stored as JSON. */
export type Spec = Omit<ProcessSpec__Output, 'stdin'> & { stdin: string };

/** The parameters of a command without its machine. */
export type CommandParams = Omit<Input<Api['commands']['async']>, 'machine_id'>;

const nothing = Buffer.alloc(0);
/** Fields of a record before the agent has reported anything. */
const unreported = {
  ...{ status: 'queued' as const, exit_code: null, signal: null, stdout: nothing, stderr: nothing },
  ...{ stdout_bytes: 0, stderr_bytes: 0, stdout_start: 0, stderr_start: 0, kept_bytes: 0 },
  ...{
    started_at: null,
    finished_at: null,
    reason: null,
    journal_id: '',
    cancel: false,
    output_directory: null,
  },
};

/** Creates the record of a new command, which no agent has yet. */
export function commandOf(
  params: CommandParams,
  origin: { machine_id: MachineId; key_id: KeyId; batch_id?: BatchId; schedule_id?: ScheduleId },
  created_at = now(),
): Command {
  const { command, args = null, cwd = null, user = null, queue_for } = params;
  const { machine_id } = origin;
  return {
    ...unreported,
    ...{ id: newId('command') as CommandId, machine_id, command, args, cwd, user, created_at },
    requested_by: origin.key_id,
    schedule_id: origin.schedule_id ?? null,
    batch_id: origin.batch_id ?? null,
    queue_until: queue_for === undefined ? null : created_at + queue_for,
  };
}

export function specOf(params: CommandParams): Spec {
  const { command, args, cwd = '', env = {}, user = '', stdin = '', timeout = 0, input = false } = params;
  const direct = args !== undefined;
  return { command, direct, args: args ?? [], cwd, env, user, stdin, timeout_ms: timeout, input };
}

/** The capabilities that the agent's setting --allow must include for this command. */
export const capabilitiesFor = ({ user }: CommandParams): string[] =>
  user === undefined ? ['exec'] : ['exec', 'user'];

/** The record fields that are set when a command ends. */
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

/** Converts an agent's exit report to fields of the command's record. `journalId` is the id of the agent's journal. */
export function endOf(exit: ProcessExit__Output, command: Command, journalId: string): End {
  // The agent reports EXPIRED for a command that never ran. The broker stores `lost` instead if it saw the command run,
  // or if the agent has got another journal since it got the command.
  const unsure =
    exit.outcome === 'PROCESS_OUTCOME_EXPIRED' &&
    (command.started_at !== null || journalId !== command.journal_id);
  const ran = exit.outcome === 'PROCESS_OUTCOME_EXITED';
  const status = unsure ? 'lost' : ran && exit.exit_code !== 0 ? 'failed' : outcomes[exit.outcome];
  const timed = exit.started_at_ms > 0;
  // Retention compares these times with the broker's clock, so a machine whose clock is ahead must not set future ones.
  const ahead = Math.max(0, exit.finished_at_ms - now());
  return {
    status,
    exit_code: timed && status !== 'lost' ? exit.exit_code : null,
    signal: exit.signal || null,
    reason: unsure ? 'no_report' : withoutNul(exit.reason) || null,
    ...(timed && { started_at: Math.max(1, exit.started_at_ms - ahead) }),
    ...(exit.finished_at_ms > 0 && { finished_at: exit.finished_at_ms - ahead }),
  };
}

/**
 * True if the times, the counts, the signal and the reason in a report are valid. Otherwise the report's command ends
 * with the status `lost`, and other commands continue.
 */
export function isPlausible({ started, output, exit }: ProcessEvent__Output): boolean {
  const times = [started?.started_at_ms ?? 0, exit?.started_at_ms ?? 0, exit?.finished_at_ms ?? 0];
  const endOffset = (output?.offset ?? 0) + (output?.data.length ?? 0);
  const counts = [exit?.stdout_bytes ?? 0, exit?.stderr_bytes ?? 0, endOffset];
  const within = (values: number[], most: number): boolean =>
    values.every((value) => value >= 0 && value <= most);
  const words = /^[\x20-\x7e]{0,32}$/.test(exit?.signal ?? '') && (exit?.reason.length ?? 0) <= 4096;
  return within(times, latestInstant) && within(counts, Number.MAX_SAFE_INTEGER) && words;
}

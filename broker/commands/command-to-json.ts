// Converts commands and batches from the broker's records to the JSON of the REST API.
import type { Api, Caller, Reply } from '../../shared/api/route-table.ts';
import { iso, isoOrNull } from '../../shared/clock.ts';
import type { Batch, Command, CommandRecord, Tally } from './command-record.ts';

/**
 * Maximum bytes of stdout, and of stderr, for each command in a list. These are enough to see the result, and a page of
 * 100 commands stays small.
 */
export const listedBytes = 4096;

/** Serializes a command with the last `most` bytes of each stream. */
export function serializeListed(command: Command, most = listedBytes): CommandRecord {
  const { stdout, stderr } = command;
  return serialize({ ...command, stdout: stdout.subarray(-most), stderr: stderr.subarray(-most) });
}

/** Serializes a command with all of the output in its record. */
export function serialize(command: Command): CommandRecord {
  const {
    cancel: _,
    journal_id: __,
    kept_bytes: ___,
    output_directory: ____,
    queue_until,
    ...rest
  } = command;
  const { started_at, finished_at, status } = command;
  return {
    ...rest,
    stdout: textOf(command.stdout, command.stdout_bytes),
    stderr: textOf(command.stderr, command.stderr_bytes),
    stdout_truncated: command.stdout.length < command.stdout_bytes,
    stderr_truncated: command.stderr.length < command.stderr_bytes,
    duration: durationOf(command),
    created_at: iso(command.created_at),
    started_at: isoOrNull(started_at),
    finished_at: isoOrNull(finished_at),
    queued_until: queue_until === null || status !== 'queued' ? null : iso(queue_until),
  };
}

/**
 * Returns the record without its output, unless the caller has the scope commands:read or its key ran the
 * command.
 */
export function serializeFor(caller: Caller, record: CommandRecord): CommandRecord {
  if (caller.may('commands:read') || record.requested_by === caller.key_id) return record;
  const { stdout_bytes, stderr_bytes } = record;
  const cut = { stdout_truncated: stdout_bytes > 0, stderr_truncated: stderr_bytes > 0 };
  return { ...record, stdout: '', stderr: '', ...cut };
}

/** Returns the milliseconds from a command's start to its end; null unless it has both. */
export function durationOf({ started_at, finished_at }: Command): number | null {
  return started_at === null || finished_at === null ? null : Math.max(0, finished_at - started_at);
}

/**
 * Decodes the last bytes of a stream of `total` bytes. Leaves out the first character if it is incomplete.
 */
function textOf(tail: Buffer, total: number): string {
  let from = 0;
  if (tail.length < total) while (from < 3 && ((tail[from] ?? 0) & 0xc0) === 0x80) from += 1;
  return tail.toString('utf8', from);
}

/** Serializes the end of a command, without its output. */
export function serializeEnd(command: Command) {
  const { status, exit_code, signal, reason, stdout_bytes, stderr_bytes } = command;
  return { status, exit_code, signal, reason, duration: durationOf(command), stdout_bytes, stderr_bytes };
}

const noneByStatus = {
  ...{ queued: 0, running: 0, completed: 0, failed: 0 },
  ...{ timeout: 0, cancelled: 0, expired: 0, lost: 0 },
};

/** Serializes a batch; `members` counts its commands by status. */
export function serializeBatch({ cancel, created_at, ...batch }: Batch, members: readonly Tally[]) {
  const counts = { ...noneByStatus };
  for (const { status, n } of members) counts[status] += n;
  const total = members.reduce((sum, { n }) => sum + n, 0);
  const open = counts.queued + counts.running > 0;
  const done = counts.completed === total ? 'completed' : cancel ? 'cancelled' : 'failed';
  const status: Reply<Api['batches']['get']>['status'] = open ? 'running' : done;
  const last = members.reduce((latest, { finished_at }) => Math.max(latest, finished_at ?? 0), created_at);
  return {
    ...batch,
    status,
    total,
    counts,
    created_at: iso(created_at),
    finished_at: open ? null : iso(last),
  };
}

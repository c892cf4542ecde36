// A command as REST shows it.
import type { Caller } from '../../shared/api/index.ts';
import { iso } from '../../shared/clock.ts';
import { type Command, type CommandRecord, listedBytes } from './records.ts';

/** A command with the end of its output only. */
export function listed(command: Command): CommandRecord {
  const { stdout, stderr } = command;
  return shown({ ...command, stdout: stdout.subarray(-listedBytes), stderr: stderr.subarray(-listedBytes) });
}

/** A command with all that its record keeps of its output. */
export function shown(command: Command): CommandRecord {
  const { cancel: _, journal_id: __, kept_bytes: ___, queue_until, ...rest } = command;
  const { started_at, finished_at, status } = command;
  return {
    ...rest,
    stdout: textOf(command.stdout, command.stdout_bytes),
    stderr: textOf(command.stderr, command.stderr_bytes),
    stdout_truncated: command.stdout.length < command.stdout_bytes,
    stderr_truncated: command.stderr.length < command.stderr_bytes,
    duration: durationOf(command),
    created_at: iso(command.created_at),
    started_at: started_at === null ? null : iso(started_at),
    finished_at: finished_at === null ? null : iso(finished_at),
    queued_until: queue_until === null || status !== 'queued' ? null : iso(queue_until),
  };
}

/** What a caller may know of one that it steers: output takes commands:read, but for whoever ran it. */
export function shownTo(caller: Caller, record: CommandRecord): CommandRecord {
  if (caller.may('commands:read') || record.requested_by === caller.key_id) return record;
  const { stdout_bytes, stderr_bytes } = record;
  const cut = { stdout_truncated: stdout_bytes > 0, stderr_truncated: stderr_bytes > 0 };
  return { ...record, stdout: '', stderr: '', ...cut };
}

/** Milliseconds from its start to its end; null where it has not both. */
export function durationOf({ started_at, finished_at }: Command): number | null {
  return started_at === null || finished_at === null ? null : Math.max(0, finished_at - started_at);
}

/** Text of the kept bytes; a cut in the middle of a character does not show as a bad one. */
function textOf(kept: Buffer, total: number): string {
  let from = 0;
  if (kept.length < total) while (from < 3 && ((kept[from] ?? 0) & 0xc0) === 0x80) from += 1;
  return kept.toString('utf8', from);
}

/** How a command ended. */
export function shownEnd(command: Command) {
  const { status, exit_code, signal, reason, stdout_bytes, stderr_bytes } = command;
  return { status, exit_code, signal, reason, duration: durationOf(command), stdout_bytes, stderr_bytes };
}

// From what was asked to a command: its record, what is to start, and whether the owner of the machine allows it.
import type { Api, Input } from '../../shared/api/index.ts';
import type { BatchId, CommandId, KeyId, MachineId, ScheduleId } from '../../shared/api/route.ts';
import { now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { MachineFacts } from '../presence/machine-facts.ts';
import type { Command, Spec } from './records.ts';

/** What is asked for, wherever it is to run. */
export type Wish = Omit<Input<Api['commands']['async']>, 'machine_id'>;

/** A record that waits; whoever hands it to an agent says so in it. `whole`: what it is a part of. */
export function commandOf(
  wish: Wish & { machine_id: MachineId },
  { key_id }: { key_id: KeyId },
  whole: { batch_id?: BatchId; schedule_id?: ScheduleId } = {},
): Command {
  const created_at = now();
  return {
    id: newId('command') as CommandId,
    machine_id: wish.machine_id,
    command: wish.command,
    args: wish.args ?? null,
    cwd: wish.cwd ?? null,
    user: wish.user ?? null,
    status: 'queued',
    exit_code: null,
    signal: null,
    stdout: Buffer.alloc(0),
    stderr: Buffer.alloc(0),
    stdout_bytes: 0,
    stderr_bytes: 0,
    stdout_start: 0,
    stderr_start: 0,
    created_at,
    started_at: null,
    finished_at: null,
    reason: null,
    requested_by: key_id,
    schedule_id: whole.schedule_id ?? null,
    batch_id: whole.batch_id ?? null,
    journal_id: '',
    queue_until: wish.queue_for === undefined ? null : created_at + wish.queue_for,
    cancel: false,
    kept_bytes: 0,
  };
}

export function specOf(wish: Wish): Spec {
  return {
    command: wish.command,
    direct: wish.args !== undefined,
    args: wish.args ?? [],
    cwd: wish.cwd ?? '',
    env: wish.env ?? {},
    user: wish.user ?? '',
    stdin: wish.stdin ?? '',
    timeout_ms: wish.timeout ?? 0,
    input: wish.input ?? false,
  };
}

/** The owner's lock is known from hello: refuse before anything is stored. */
export function refuseLocked(
  { machineFacts }: { machineFacts: MachineFacts },
  machineId: string,
  user: string | undefined,
): void {
  const allowed = machineFacts.of(machineId)?.capabilities ?? [];
  // It was never linked: its agent refuses for itself.
  if (allowed.length === 0) return;
  const missing = ['exec', ...(user === undefined ? [] : ['user'])].find((one) => !allowed.includes(one));
  if (missing) {
    throw new AppError('permission_denied', `the owner of this machine does not allow ${missing}`, {
      machine_id: machineId,
      capability: missing,
    });
  }
}

// A new session: whether its machine can take one, its record, and what its agent is to open.
import type { Caller } from '../../shared/api/index.ts';
import type { MachineId, SessionId } from '../../shared/api/route.ts';
import { now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import { openTerminals } from '../../shared/limits.ts';
import type { History } from '../history.ts';
import type { Link, Presence } from '../presence/index.ts';
import type { MachineFacts } from '../presence/machine-facts.ts';
import type { State } from '../state/index.ts';
import type { Keeping } from './keeping.ts';
import type { Life } from './life.ts';
import type { Records, Session, Wish } from './records.ts';
import { type Run, type Runs, runOf } from './run.ts';

interface Rooms {
  state: State;
  history: History;
  presence: Presence;
  machineFacts: MachineFacts;
  records: Records;
  runs: Runs;
  life: Life;
  keeping: Keeping;
}

const methods = ['OpenTerminal', 'KeepTerminal', 'AttachTerminal'];

/** Persists a session, then has its terminal opened. Throws before anything is kept. */
export function creator({ state, history, presence, machineFacts, records, runs, life, keeping }: Rooms) {
  function placeOn(machine_id: MachineId): Link {
    const link = presence.get(machine_id);
    if (!machineFacts.of(machine_id)?.capabilities.includes('terminal')) {
      const details = { machine_id, capability: 'terminal' };
      throw new AppError('permission_denied', 'the owner of this machine does not allow terminal', details);
    }
    const missing = methods.find((method) => !link.methods.includes(method));
    if (missing) {
      const details = { machine_id, method: missing };
      throw new AppError('not_supported', 'the agent on this machine has no terminals: update it', details);
    }
    const open = runs.on(machine_id).filter(({ over }) => !over);
    if (open.length >= openTerminals) {
      const message = `${openTerminals} sessions are open on this machine already: end one`;
      throw new AppError('unavailable', message, { machine_id, limit: openTerminals });
    }
    return link;
  }

  /** It takes its place before it is on disk. */
  async function store(session: Session, caller: Caller): Promise<Run> {
    const run = runOf(session, false);
    runs.add(run);
    try {
      await history.write((journal) => {
        records.put(session);
        life.tell(journal, 'session.created', session);
        caller.commit(journal, { session_id: session.id });
      });
    } catch (error) {
      runs.delete(run);
      throw error;
    }
    run.stored = true;
    return run;
  }

  return async (wish: Wish, caller: Caller): Promise<Run> => {
    const link = placeOn(wish.machine_id);
    const facts = machineFacts.of(wish.machine_id);
    const heard = { machine_hostname: facts?.hostname ?? '', last_heartbeat_at: facts?.last_seen ?? null };
    const session = { ...sessionOf(wish, caller), ...heard, instance_id: link.instanceId };
    const run = await store(session, caller);
    // It may have gone while that was written.
    if (!state.machines.has(wish.machine_id)) void life.ended(run, { reason: 'machine_removed' });
    else keeping.open(run, specOf(wish), caller);
    return run;
  };
}

function sessionOf(
  { machine_id, shell, grace_period, cols, rows }: Wish,
  caller: Caller,
): Omit<Session, 'machine_hostname' | 'last_heartbeat_at' | 'instance_id'> {
  return {
    id: newId('session') as SessionId,
    machine_id,
    shell: shell ?? null,
    status: 'PENDING',
    created_at: now(),
    connected_at: null,
    grace_period,
    grace_period_started_at: null,
    ended_at: null,
    exit_code: null,
    signal: null,
    reason: null,
    cols,
    rows,
    requested_by: caller.key_id,
    ending: false,
  };
}

function specOf({ shell = '', args = [], cwd = '', env = {}, cols, rows, grace_period }: Wish) {
  return { program: shell, args, cwd, env, size: { cols, rows }, grace_ms: grace_period };
}

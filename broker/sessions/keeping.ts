// Keeps the terminals of all sessions: opens each once, keeps it again after a lost link, ends it, has it forgotten.
import type { ProcessExit__Output } from '../../proto/types/farhand/agent/v1/ProcessExit.ts';
import type { TerminalEvent__Output } from '../../proto/types/farhand/agent/v1/TerminalEvent.ts';
import type { TerminalSpec } from '../../proto/types/farhand/agent/v1/TerminalSpec.ts';
import type { Caller } from '../../shared/api/index.ts';
import { after } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { isId, newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import { acknowledge } from '../link/acknowledge.ts';
import type { Link, Presence } from '../presence/index.ts';
import type { End, Life } from './life.ts';
import type { Session } from './records.ts';
import type { Run, Runs } from './run.ts';

export interface Keeping {
  /** Has the terminal opened, once in its life, if its machine is still there. */
  open(run: Run, spec: TerminalSpec, asker: Asker): void;
  /** Has it and its whole tree ended, now or when its agent is back. */
  end(run: Run, asker: Asker): void;
  /** Its end is on disk and nobody reads it any more. */
  settled(run: Run): void;
  stop(): void;
}

type Asker = Pick<Caller, 'request_id' | 'key_id' | 'key_name'>;

interface KeepingRooms {
  presence: Presence;
  life: Life;
  runs: Runs;
}

type Parts = AsyncIterable<{ event?: TerminalEvent__Output | null }>;

const lasting = { idle_ms: 0, lane: 'terminal' } as const;
/** From a hangup to KILL. */
const endGraceMs = 2_000;
/** An agent that was told to end one has killed it, or given up, well before. */
const overdueMs = 15_000;
/** What a linked agent did not answer is asked again after this. */
const againMs = 1_000;
/** An agent that says so may have the terminal all the same. */
const unsure: readonly string[] = ['machine_offline', 'machine_timeout', 'unavailable'];

export function openKeeping({ presence, life, runs }: KeepingRooms, log: Logger): Keeping {
  let stopped = false;
  const linkOf = (machineId: string): Link | undefined =>
    presence.online(machineId) ? presence.get(machineId) : undefined;

  /** Hears one keeper's call to its end; whoever has another link meanwhile has another call. */
  async function follow(run: Run, link: Link, parts: Parts, opening: boolean): Promise<void> {
    const current = (): boolean => run.link === link && !run.ended && !stopped;
    try {
      for await (const { event } of parts) {
        if (!current()) return;
        if (event?.started) life.connected(run, link);
        if (event?.exit) {
          run.exited = true;
          return await life.ended(run, endOf(event.exit, run, link));
        }
      }
    } catch (error) {
      const why = error instanceof AppError ? error.code : error;
      log.info({ why, session_id: run.session.id }, 'lost sight of a session');
      const end = refusalOf(error, opening && run.session.status === 'PENDING', run, link);
      if (end && current()) return await life.ended(run, end);
    }
    after(againMs, () => {
      if (current()) keep(run, link);
    });
  }

  function keep(run: Run, link: Link): void {
    run.link = link;
    const { id } = run.session;
    const parts = link.stub.keepTerminal({ id }, { request_id: newId('request'), ...lasting });
    void follow(run, link, parts, false);
    if (run.session.ending) demandEnd(run);
  }

  /** An agent that never tells the end must not keep the session. */
  function demandEnd(run: Run, asker?: Asker): void {
    kill(run, asker);
    after(overdueMs, () => {
      if (!stopped) void life.ended(run, { reason: 'ended' });
    });
  }

  function kill(run: Run, asker?: Asker): void {
    const { id } = run.session;
    const { link } = run;
    if (!link || run.ended || stopped) return;
    link.stub
      .killProcess(
        { id, grace_ms: endGraceMs },
        { request_id: asker?.request_id ?? newId('request'), caller: asker },
      )
      .catch((error: unknown) => {
        log.warn({ err: error, session_id: id }, 'could not end a session; asking again');
        after(againMs, () => kill(run, asker));
      });
  }

  /** One that is over here, or that nobody here knows: its agent may have it still. */
  function putAway(link: Link, id: string): void {
    link.stub
      .killProcess({ id, grace_ms: endGraceMs }, { request_id: newId('request') })
      .catch((error: unknown) => log.debug({ err: error, session_id: id }, 'nothing to end'));
    // What still runs is forgotten when it is over.
    acknowledge(presence, link.machineId, [id], log);
  }

  const stopWatching = presence.watch((machineId) => {
    const link = linkOf(machineId);
    for (const run of runs.on(machineId)) {
      if (!run.stored) continue;
      if (run.link && run.link !== link) life.away(run);
      if (link && !run.link && !run.ended) keep(run, link);
    }
    const strays = link?.processIds.filter((id) => isId('session', id) && (runs.get(id)?.over ?? true)) ?? [];
    for (const id of strays) if (link) putAway(link, id);
  });

  return {
    open(run, spec, asker) {
      const link = linkOf(run.session.machine_id);
      if (!link) return void life.ended(run, { reason: 'machine_offline: it left before this could start' });
      run.link = link;
      const request = { id: run.session.id, spec };
      const options = { request_id: asker.request_id, caller: asker, ...lasting };
      void follow(run, link, link.stub.openTerminal(request, options), true);
    },
    end(run, asker) {
      if (run.link) demandEnd(run, asker);
      else void life.ended(run, { reason: 'ended' });
    },
    settled({ session: { id, machine_id }, exited }) {
      const link = linkOf(machine_id);
      if (link && !exited && !stopped) putAway(link, id);
      else acknowledge(presence, machine_id, [id], log);
    },
    stop() {
      stopped = true;
      stopWatching();
    },
  };
}

/** What an exit means for the record. */
function endOf(exit: ProcessExit__Output, { session }: Run, link: Link): End {
  const ran = ['PROCESS_OUTCOME_EXITED', 'PROCESS_OUTCOME_TIMEOUT', 'PROCESS_OUTCOME_CANCELLED'];
  const told = exit.reason.slice(0, 4096) || null;
  if (!ran.includes(exit.outcome)) {
    if (exit.outcome === 'PROCESS_OUTCOME_NOT_STARTED') return { reason: told ?? 'could not start' };
    if (exit.outcome === 'PROCESS_OUTCOME_LOST' && told) return { reason: told };
    return lostOn(session, link);
  }
  const signal = /^[\x20-\x7e]{1,32}$/.test(exit.signal) ? exit.signal : null;
  const reason = session.ending
    ? 'ended'
    : exit.outcome === 'PROCESS_OUTCOME_EXITED'
      ? told
      : (told ?? 'ended');
  return { exit_code: exit.exit_code, signal, reason };
}

/** Terminals die with the agent that opened them. */
function lostOn(session: Session, link: Link): End {
  return { reason: session.instance_id === link.instanceId ? 'lost' : 'agent_restarted' };
}

/** What a refusal means: nothing was started, or the terminal is not known any more. Undefined: ask again. */
function refusalOf(error: unknown, opening: boolean, { session }: Run, link: Link): End | undefined {
  if (!(error instanceof AppError)) return undefined;
  const full = opening && error.code === 'unavailable';
  if (unsure.includes(error.code) && !full) return undefined;
  if (opening) return { reason: `${error.code}: ${error.message}` };
  return lostOn(session, link);
}

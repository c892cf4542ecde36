// Commands that agents have: followed again after a lost link, ended on request, and forgotten there when they are over.
import { after } from '../../shared/clock.ts';
import { isId, newId } from '../../shared/ids.ts';
import { killGraceMs } from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Asking } from '../../shared/rpc.ts';
import { openForgetting } from '../link/forgetting.ts';
import type { Link, Presence } from '../presence/index.ts';
import { openFollowing } from './following.ts';
import type { Ledger } from './ledger.ts';
import { streams } from './output.ts';
import type { Places } from './places.ts';
import type { Command, Spec } from './records.ts';
import type { Run } from './run.ts';

export interface Supervision {
  /** Hands a command to its agent, once in its life. */
  start(run: Run, link: Link, spec: Spec): void;
  /** Has its agent end it, now or when it is back. */
  kill(run: Run): void;
  /** Its end is on disk. */
  over(command: Command): void;
  stop(): void;
}

/** A cancelled command that dies within TERM's grace has ended by then. */
export const cancelWaitMs = killGraceMs + 1_000;
/** What a linked agent did not answer is asked again after this. */
const againMs = 1_000;

interface SupervisionRooms {
  presence: Presence;
  places: Places;
  ledger: Ledger;
  again(run: Run): boolean;
  /** The key behind a command. */
  asking(run: Run): Asking;
}

export function openSupervision(rooms: SupervisionRooms, log: Logger): Supervision {
  const { presence, places, ledger } = rooms;
  const following = openFollowing(ledger, { again: rooms.again, lost: lookAgain, asking: rooms.asking }, log);
  const forgetting = openForgetting(presence, log);
  let stopped = false;

  /** Follows everything of a machine that nobody follows, and passes on what was asked meanwhile. */
  function resume(machineId: string): void {
    const link = presence.get(machineId);
    for (const run of places.given(machineId)) {
      if (!run.stored || run.following || run.end) continue;
      following.resume(run, link);
      if (run.command.cancel) kill(run);
    }
  }

  /** A newer link may have come while the old one was still ending, or the machine was only slow. */
  function lookAgain(run: Run): void {
    const { machine_id } = run.command;
    after(againMs, () => {
      if (!stopped && presence.online(machine_id)) resume(machine_id);
    });
  }

  function kill(run: Run): void {
    const { id, machine_id } = run.command;
    if (stopped || run.end || !presence.online(machine_id)) return;
    // Its readers have waited long enough for what is still to come.
    for (const stream of streams) run.output[stream].release();
    presence
      .get(machine_id)
      .stub.killProcess(
        { id, grace_ms: killGraceMs },
        { request_id: newId('request'), caller: run.cancelledBy },
      )
      .catch((error: unknown) => {
        // Its start may still be on the way there.
        log.warn({ err: error, command_id: id }, 'could not cancel; asking again');
        after(againMs, () => kill(run));
      });
  }

  const stopWatching = presence.watch((machineId, online) => {
    if (!online) return;
    resume(machineId);
    // What ended while the agent could not be told, and what nobody here knows any more.
    const { processIds } = presence.get(machineId);
    forgetting.add(
      machineId,
      // Terminals are the sessions' own.
      processIds.filter((id) => !places.get(id) && !isId('session', id)),
    );
  });

  return {
    start: following.start,
    kill,
    over({ id, machine_id, journal_id }) {
      if (journal_id !== '') forgetting.add(machine_id, [id]);
    },
    stop() {
      stopped = true;
      stopWatching();
      forgetting.close();
    },
  };
}

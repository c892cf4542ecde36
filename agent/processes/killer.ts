// The end of a running process that did not end by itself: why, with which grace, and its whole tree.
import { constants } from 'node:os';
import { after } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Births } from './births.ts';
import type { Exited } from './spawner/kernel.ts';
import type { Child } from './spawner/process.ts';
import { type Ending, killTree, Tree } from './tree.ts';

/** Why a process was ended by us; abandoned: nobody keeps it; orphaned: its spawner died. */
export type KillCause = 'timeout' | 'cancelled' | 'abandoned' | 'stopped' | 'orphaned';

export interface KillerOptions {
  id: string;
  /** 0: none. */
  timeoutMs: number;
  graceMs: number;
  stopGraceMs: number;
  killForMs: number;
  /** What it is ended with first. */
  first: Ending;
  /** What it leaves behind at its own end is ended as well, with this grace. */
  leftoversMs?: number;
  /** Where the agent can know. */
  births: Births | undefined;
  log: Logger;
}

export interface Killer {
  kill(cause: KillCause, graceMs: number): void;
  /** Resolves when the tree is gone or given up; at once when nobody killed. */
  finished(): Promise<void>;
  /** Resolves when a kill was given up and the process is still there. */
  givenUp: Promise<Exited>;
  cause(): KillCause | undefined;
}

export function makeKiller(child: Child, links: string[], options: KillerOptions): Killer {
  const { id, timeoutMs, graceMs, stopGraceMs, killForMs, first, leftoversMs, births, log } = options;
  const { pid } = child;
  const hurry = new AbortController();
  const timers: (() => void)[] = [];
  const givenUp = Promise.withResolvers<Exited>();
  let alive = true;
  let cause: KillCause | undefined;
  let killing: Promise<void> | undefined;

  async function killAll(): Promise<void> {
    try {
      const tree = new Tree([id], links, [child], births?.of(id));
      const left = await killTree(tree, hurry.signal, killForMs, first);
      if (left > 0) log.error({ id, pid, left }, 'processes of a command could not be killed');
    } catch (error) {
      log.error({ err: error, id, pid }, 'the kill of a command failed');
    }
    givenUp.resolve({ code: 0, signal: constants.signals.SIGKILL });
  }
  function kill(why: KillCause, grace: number): void {
    if (!alive && !killing) return;
    if (alive) cause ??= why;
    end(grace);
  }
  function end(grace: number): void {
    timers.push(after(grace, () => hurry.abort()));
    killing ??= killAll();
  }

  if (timeoutMs > 0) timers.push(after(timeoutMs, () => kill('timeout', graceMs)));
  void child.exited.then((how) => {
    if (!how) return kill('orphaned', stopGraceMs);
    alive = false;
    // During a kill the grace goes on for the rest of the tree.
    if (killing) return;
    for (const cancel of timers) cancel();
    if (leftoversMs !== undefined) end(leftoversMs);
  });
  return {
    kill,
    givenUp: givenUp.promise,
    cause: () => cause,
    async finished() {
      await killing;
      for (const cancel of timers) cancel();
    },
  };
}

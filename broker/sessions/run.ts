// Sessions that have not ended, or whose clients still read their last words, as the broker holds them in memory.
import { Wake } from '../../shared/pace.ts';
import type { Link } from '../presence/index.ts';
import type { Attached, Session, Status } from './records.ts';

export interface Run {
  session: Session;
  /** It is on disk; before that nothing is done with it. */
  stored: boolean;
  /** Its status as it is on disk. */
  written: Status;
  /** The link to the agent that has the terminal; none while that is away. */
  link: Link | undefined;
  /** How it ended is known; on disk a little later. */
  ended: boolean;
  /** Its agent has told how it ended: there is nothing left there. */
  exited: boolean;
  /** Its end is on disk. */
  over: boolean;
  readonly clients: Map<string, Client>;
  /** Wakes whoever waits for another status, or for the link. */
  readonly changed: Wake;
  cancelGrace: () => void;
  cancelResize: () => void;
}

/** One that is attached, as its session sees it. */
export interface Client {
  readonly attached: Attached;
  /** Takes no more part. Resolves when that is on disk. Never rejects. */
  dismiss(why: 'detached' | 'forbidden' | 'stopping'): Promise<void>;
  /** The end of its session is on disk. */
  ended(): void;
}

export function runOf(session: Session, stored: boolean): Run {
  return {
    session,
    stored,
    written: session.status,
    link: undefined,
    ended: false,
    exited: false,
    over: false,
    clients: new Map(),
    changed: new Wake(),
    cancelGrace: () => {},
    cancelResize: () => {},
  };
}

/** Resolves when `test` holds, or the signal fires. */
export async function until(run: Run, test: () => boolean, signal: AbortSignal): Promise<void> {
  while (!test() && !signal.aborted) await run.changed.wait(signal);
}

/** All of them, in the order they came. */
export class Runs {
  readonly #runs = new Map<string, Run>();

  add(run: Run): void {
    this.#runs.set(run.session.id, run);
  }

  delete({ session }: Run): void {
    this.#runs.delete(session.id);
  }

  get(id: string): Run | undefined {
    return this.#runs.get(id);
  }

  all(): Run[] {
    return [...this.#runs.values()];
  }

  on(machineId: string): Run[] {
    return this.all().filter(({ session }) => session.machine_id === machineId);
  }

  /** Clients of all sessions of a machine. */
  clientsOn(machineId: string): number {
    return this.on(machineId).reduce((sum, { clients }) => sum + clients.size, 0);
  }
}

// Whose a process is that commands have started, but that shows neither mark nor kin: where only one ran at its birth and
// none has left anything alive, that one's; else nobody can say.
import { uptime } from 'node:os';
import type { Logger } from '../../shared/logger.ts';
import type { Leader } from './census.ts';
import { type Birthplace, openBirthplace } from './cgroup.ts';
import type { Claim } from './tree.ts';

/** Of proc(5): the unit of start times, the same on every Linux that Node runs on. */
const ticksPerSecond = 100;
/** Start times are rounded down, and an end is heard of a little late. */
const slackTicks = 3;

interface Lifetime {
  from: number;
  /** Undefined while it runs. */
  to?: number;
}

/** `name`: that of one agent and no other. Undefined where the agent cannot know. */
export async function openBirths(name: string, log: Logger): Promise<Births | undefined> {
  const place = await openBirthplace(name, log);
  return place && new Births(place);
}

export class Births {
  readonly #place: Birthplace;
  readonly #known = new Map<string, Lifetime>();
  readonly #spawners = new Set<number>();

  /** Through openBirths. */
  constructor(place: Birthplace) {
    this.#place = place;
  }

  /** What this spawner forks from now on is known. */
  enter(spawner: number): Promise<void> {
    this.#spawners.add(spawner);
    return this.#place.enter(spawner);
  }

  /** What belongs to a command that still runs. */
  of(id: string): Claim {
    return { pids: () => this.#place.pids(), mine: (one, others) => this.#only(id, one.start, others) };
  }

  /** `start`: of its first process, see proc(5). */
  began(id: string, start: string): void {
    this.#known.set(id, { from: Number(start) });
  }

  ended(id: string): void {
    const lifetime = this.#known.get(id);
    if (lifetime) lifetime.to = uptime() * ticksPerSecond;
    this.#prune();
  }

  close(): Promise<void> {
    return this.#place.close();
  }

  /** Whether a process of this start time can only be of that command. */
  #only(id: string, start: string, others: readonly Leader[]): boolean {
    const at = Number(start);
    const own = this.#known.get(id);
    if (!own || at < own.from) return false;
    // A daemon that an earlier command has left may have started it.
    if (others.some((one) => Number(one.start) < own.from && !this.#spawners.has(one.pid))) return false;
    return [...this.#known].every(
      ([other, { from, to }]) =>
        other === id || at < from - slackTicks || (to !== undefined && at > to + slackTicks),
    );
  }

  /** What ended before everything that runs began can be nobody's rival. */
  #prune(): void {
    const open = [...this.#known.values()].filter(({ to }) => to === undefined);
    const first = Math.min(...open.map(({ from }) => from));
    for (const [id, { to }] of this.#known) {
      if (to !== undefined && to + slackTicks < first) this.#known.delete(id);
    }
  }
}

// The spawners of an agent: one, and another beside it once a crowd of commands waits; after a death comes a new one.
import { monotonic } from '../../../shared/clock.ts';
import { AppError } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import type { Births } from '../births.ts';
import { killTree, Tree } from '../tree.ts';
import type { SpawnRequest } from './program.ts';
import { type Child, Spawner, SpawnerDied } from './spawner.ts';

/** A spawner waits while what it has forked becomes the command: where so many starts wait, two are faster than one. */
const crowd = 4;
/** More than any agent has had at once: what is searched for after its death. */
const mostEver = 8;
/** After one that could not be started beside another. */
const againMs = 60_000;
/** How long KILL is repeated for what a dead one left half started. */
const killForMs = 5_000;

export class Spawners {
  readonly #places: readonly Place[];
  readonly #log: Logger;
  /** Monotonic: until then one has to do. */
  #notBefore = 0;

  /** `name`: the same for all agents of a data directory, and for nobody else. `most`: at once, 1 to 8. */
  constructor(name: string, most: number, births: Births | undefined, log: Logger) {
    const marks = marksOf(name).slice(0, most);
    this.#places = marks.map((mark) => new Place(mark, births, log));
    this.#log = log;
  }

  get pids(): number[] {
    return this.#places.flatMap(({ pid }) => pid ?? []);
  }

  /** Resolves when one can be asked. Rejects with unavailable. */
  async ready(): Promise<void> {
    if (this.#living().length > 0) return;
    // One that is on its way is there sooner.
    const next = this.#places.find(({ starting }) => starting) ?? this.#places[0];
    await next?.start();
  }

  /** Asks in this very turn the one with the least to do; rejects with SpawnFailed or SpawnerDied. */
  spawn(request: SpawnRequest): Promise<Child> {
    const [least] = this.#living().toSorted((a, b) => a.starting - b.starting);
    if (!least) return Promise.reject(new SpawnerDied());
    if (least.starting >= crowd && monotonic() >= this.#notBefore) this.#more();
    return least.spawn(request);
  }

  async stop(): Promise<void> {
    await Promise.all(this.#places.map((place) => place.stop()));
  }

  #living(): Spawner[] {
    return this.#places.flatMap(({ living }) => (living?.connected ? living : []));
  }

  /** Nobody waits for it. */
  #more(): void {
    const free = this.#places.find(({ living, starting }) => !living && !starting);
    free?.start().catch((error: unknown) => {
      this.#notBefore = monotonic() + againMs;
      this.#log.warn({ err: error }, 'a crowd of commands has one spawner');
    });
  }
}

/** In the environments of spawners of that name, whatever agent had them. No id of a command has a colon. */
export function marksOf(name: string): string[] {
  return Array.from({ length: mostEver }, (_, n) => `spawner:${name}:${n}`);
}

/** Where there is one spawner, or none, or after its death another. */
class Place {
  /** What they fork has it until it becomes the command. */
  readonly mark: string;
  living: Spawner | undefined;
  pid: number | undefined;
  readonly #births: Births | undefined;
  readonly #log: Logger;
  #starting: Promise<void> | undefined;
  /** What a dead one forked may not have become its command yet: until that is gone none follows. */
  #cleared: Promise<unknown> = Promise.resolve();

  constructor(mark: string, births: Births | undefined, log: Logger) {
    this.mark = mark;
    this.#births = births;
    this.#log = log;
  }

  get starting(): boolean {
    return this.#starting !== undefined;
  }

  start(): Promise<void> {
    this.#starting ??= this.#begin().finally(() => {
      this.#starting = undefined;
    });
    return this.#starting;
  }

  async stop(): Promise<void> {
    await this.#starting?.catch(() => undefined);
    await this.living?.stop();
    await this.#cleared;
  }

  async #begin(): Promise<void> {
    try {
      // One that has lost its channel is being killed: what it leaves bears the mark of the next one, too.
      await this.living?.ended;
      await this.#cleared;
      const started = new Spawner(this.mark);
      this.pid = started.pid;
      await started.ready();
      await this.#births?.enter(started.pid);
      this.living = started;
      void started.ended.then((asked) => this.#over(asked));
    } catch (cause) {
      this.pid = undefined;
      throw new AppError('unavailable', 'the spawner of commands could not be started', {}, { cause });
    }
  }

  #over(asked: boolean): void {
    this.living = undefined;
    this.pid = undefined;
    if (asked) return;
    this.#log.error('a spawner died; commands that it ran are lost');
    this.#cleared = killTree(new Tree([this.mark], []), AbortSignal.abort(), killForMs).catch(
      (error: unknown) => this.#log.error({ err: error }, 'what a spawner left could not be killed'),
    );
  }
}

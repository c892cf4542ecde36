// The spawners of an agent: one, and another beside it once a crowd of commands waits; after a death comes a new one.
import { AppError } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import type { Births } from '../births.ts';
import { killTree, Tree } from '../tree.ts';
import type { SpawnRequest } from './program.ts';
import { type Child, Spawner, SpawnerDied } from './spawner.ts';

/** One of them at least was ready a moment ago. */
export interface Living {
  /** Asks in this very turn; rejects with SpawnFailed or SpawnerDied. */
  spawn(request: SpawnRequest): Promise<Child>;
}

/** A spawner waits while what it has forked becomes the command: where so many starts wait, two are faster than one. */
const crowd = 4;
/** How long KILL is repeated for what a dead one left half started. */
const killForMs = 5_000;

export class Spawners implements Living {
  readonly #places: readonly Place[];
  readonly #log: Logger;

  /** `name`: the same for all agents of a data directory, and for nobody else. `most`: at once, at least 1. */
  constructor(name: string, most: number, births: Births | undefined, log: Logger) {
    this.#places = Array.from({ length: most }, (_, n) => new Place(`spawner:${name}:${n}`, births, log));
    this.#log = log;
  }

  /** In the environments of spawners. */
  get marks(): string[] {
    return this.#places.map(({ mark }) => mark);
  }

  get pids(): number[] {
    return this.#places.flatMap(({ pid }) => pid ?? []);
  }

  /** Resolves when one can be asked. Rejects with unavailable. */
  async ready(): Promise<Living> {
    const [first] = this.#places;
    if (!this.#places.some(({ living }) => living)) await first?.start();
    return this;
  }

  /** The one with the least to do. */
  spawn(request: SpawnRequest): Promise<Child> {
    const living = this.#places.flatMap((place) => place.living ?? []);
    const [least] = living.toSorted((a, b) => a.starting - b.starting);
    if (!least) return Promise.reject(new SpawnerDied());
    if (least.starting >= crowd) this.#more();
    return least.spawn(request);
  }

  /** Nobody waits for it. */
  #more(): void {
    const free = this.#places.find(({ living }) => !living);
    free
      ?.start()
      .catch((error: unknown) => this.#log.warn({ err: error }, 'a crowd of commands has one spawner'));
  }

  async stop(): Promise<void> {
    await Promise.all(this.#places.map((place) => place.stop()));
  }
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

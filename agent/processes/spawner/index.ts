// The spawners of an agent: one, after its death another, and more beside it where it hangs. Where the agent may become
// other users and nothing else can do that for it, there are others for those.
import { AppError } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import type { Births } from '../births.ts';
import type { Promises } from '../promises.ts';
import { killTree, Tree } from '../tree.ts';
import { type Child, SpawnerDied, type SpawnerOptions, SpawnerProcess } from './process.ts';
import type { SpawnRequest } from './program.ts';

/** A program on a disk that does not answer holds up its spawner: for others there is the next one. */
const most = 4;
/** How long KILL is repeated for what a dead one left half started. */
const killForMs = 5_000;

export interface SpawnersOptions {
  /** A start that takes longer hangs. */
  lateMs: number;
  births: Births | undefined;
  /** For one of them each. */
  promises(nth: number): Promises;
  log: Logger;
}

export class Spawners {
  readonly #own: readonly Place[];
  /** For commands that become other users as they are forked. */
  readonly #forking: readonly Place[];

  /** `name`: the same for all agents of a data directory, and for nobody else. */
  constructor(name: string, { births, promises, ...options }: SpawnersOptions) {
    this.#own = marksOfKind(name, false).map((mark, nth) => {
      return new Place(mark, { ...options, forking: false, promises: promises(nth) }, births);
    });
    this.#forking = marksOfKind(name, true).map((mark) => {
      return new Place(mark, { ...options, forking: true, promises: undefined }, births);
    });
  }

  get pids(): number[] {
    return [...this.#own, ...this.#forking].flatMap(({ pid }) => pid ?? []);
  }

  /** Resolves when one can be asked for this. Rejects with unavailable. */
  async ready(ids: SpawnRequest['ids']): Promise<void> {
    const places = this.#for(ids);
    if (prompt(places)) return;
    // One that died while it hung is over only when what it was starting is.
    const free = places.find(({ living }) => !living) ?? places.find(({ living }) => !living?.connected);
    // Where all hang, waiting is all that is left.
    if (free) await free.start();
  }

  /** Whether the one that would be asked in this very turn can keep a promise before it starts something. */
  keeps(ids: SpawnRequest['ids']): boolean {
    return prompt(this.#for(ids))?.keeps ?? false;
  }

  /** Asks in this very turn; rejects with SpawnFailed, Unkept or SpawnerDied. `promise`: as it keeps one, a line. */
  spawn(request: SpawnRequest, promise?: string): Promise<Child> {
    const places = this.#for(request.ids);
    const one = prompt(places) ?? places.find(({ living }) => living?.connected)?.living;
    return one?.spawn(request, promise) ?? Promise.reject(new SpawnerDied());
  }

  async stop(): Promise<void> {
    await Promise.all([...this.#own, ...this.#forking].map((place) => place.stop()));
  }

  #for(ids: SpawnRequest['ids']): readonly Place[] {
    return ids ? this.#forking : this.#own;
  }
}

/** The first that can be asked and does not hang. */
function prompt(places: readonly Place[]): SpawnerProcess | undefined {
  return places.find(({ living }) => living?.connected && !living.hangs)?.living;
}

/** In the environments of spawners of that name, whatever agent had them. No id of a command has a colon. */
export function marksOf(name: string): string[] {
  return [...marksOfKind(name, false), ...marksOfKind(name, true)];
}

function marksOfKind(name: string, forking: boolean): string[] {
  const kind = forking ? 'forking-spawner' : 'spawner';
  return Array.from({ length: most }, (_, n) => `${kind}:${name}:${n}`);
}

/** Where there is one spawner, or none, or after its death another. */
class Place {
  /** What they fork has it until it becomes the command. */
  readonly mark: string;
  living: SpawnerProcess | undefined;
  pid: number | undefined;
  readonly #options: SpawnerOptions;
  readonly #births: Births | undefined;
  #starting: Promise<void> | undefined;
  /** What a dead one forked may not have become its command yet: until that is gone none follows. */
  #cleared: Promise<unknown> = Promise.resolve();

  constructor(mark: string, options: SpawnerOptions, births: Births | undefined) {
    this.mark = mark;
    this.#options = options;
    this.#births = births;
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
      // One that no longer speaks is being killed: what it leaves bears the mark of the next one, too.
      await this.living?.ended;
      await this.#cleared;
      await this.#options.promises?.open();
      const started = new SpawnerProcess(this.mark, this.#options);
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
    const { log } = this.#options;
    log.error('a spawner died; commands that it ran are lost');
    this.#cleared = killTree(new Tree([this.mark], []), AbortSignal.abort(), killForMs).catch(
      (error: unknown) => log.error({ err: error }, 'what a spawner left could not be killed'),
    );
  }
}

// The declared documents (machines, keys, schedules and so on), in memory and in state.json. Changes are
// committed in groups.
import { randomBytes } from 'node:crypto';
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { Low } from 'lowdb';
import type { Journal } from '../../shared/api/route-table.ts';
import { after } from '../../shared/clock.ts';
import { removeLeftovers } from '../../shared/durable-file.ts';
import { StartError } from '../../shared/errors.ts';
import type { OutboxEntry } from '../history/history.ts';
import { type Declared, type Documents, type Name, names, version } from './documents.ts';
import { commandBack, StateFile } from './state-file.ts';

export type { Declared, JoinToken, Key, Login, Machine, Schedule, Webhook } from './documents.ts';

/** Writes the outbox to history. Entries may be written a second time. */
type Apply = (entries: readonly OutboxEntry[]) => Promise<void>;

interface Pending {
  /** Makes the change. The returned function resolves the caller's promise with the result. */
  edit(transaction: StateTransaction): () => void;
  reject(error: unknown): void;
}

/** Files that a broker creates. If one of them exists and state.json does not, state.json was lost. */
const traces = ['state.json.last', 'history.db', 'authority.json'];

/** Wait before a failed write of the outbox, or a failed undo of a commit, is tried again. */
const againMs = 2_000;

/**
 * Opens the state of a directory, or creates it where no broker has run before. Throws StartError for a lost
 * or damaged state.json, and for one edited by hand unless `acceptEdit`.
 */
export async function openState(directory: string, acceptEdit = false): Promise<State> {
  await removeLeftovers(join(directory, 'state.json'));
  const file = new StateFile(directory, acceptEdit);
  const found = await file.read();
  if (found) return new State(file, found);
  assertFresh(directory);
  const empty = {
    machines: [],
    keys: [],
    logins: [],
    join_tokens: [],
    schedules: [],
    webhooks: [],
    outbox: [],
  };
  const install_id = randomBytes(16).toString('hex');
  const data: Documents = { version, install_id, generation: 1, ...empty };
  await file.write(data);
  return new State(file, data);
}

function assertFresh(directory: string): void {
  const trace = traces.find((name) => existsSync(join(directory, name)));
  if (!trace) return;
  const file = join(directory, 'state.json');
  const how = commandBack(file) ?? `put state.json from a backup into ${directory}`;
  throw new StartError(
    `${file} is missing, though a broker has run here (${trace} exists); to recover: ${how}`,
  );
}

/** The committed documents. Each change replaces their collections; a collection is never edited in place. */
export class State implements Declared {
  readonly machines!: Declared['machines'];
  readonly keys!: Declared['keys'];
  readonly logins!: Declared['logins'];
  readonly join_tokens!: Declared['join_tokens'];
  readonly schedules!: Declared['schedules'];
  readonly webhooks!: Declared['webhooks'];
  readonly #file: StateFile;
  readonly #low: Low<Documents>;
  readonly #watchers = new Set<() => void>();
  #committed: Declared;
  #queue: Pending[] = [];
  #running: Promise<void> | undefined;
  #apply: Apply | undefined;
  /**
   * Number of outbox entries in the file that are already in history.
   * The next write removes them from the file.
   */
  #applied = 0;
  #cancelAgain = (): void => {};

  constructor(file: StateFile, data: Documents) {
    this.#file = file;
    this.#low = new Low(file, data);
    const collections = names.map((name) => [name, new Map(data[name].map((one) => [one.id, one]))]);
    // The name of a collection decides the type of its documents.
    this.#committed = Object.fromEntries(collections) as Declared;
    Object.assign(this, this.#committed);
  }

  get installId(): string {
    return this.#low.data.install_id;
  }

  get generation(): number {
    return this.#low.data.generation;
  }

  /**
   * Runs `edit` and resolves with its result once the change is on disk and its outbox in history. Changes
   * that arrive together share one commit. An edit that throws, or a commit that fails, changes nothing. If
   * history cannot be written, the change still resolves, and its outbox is written later.
   */
  change<T>(edit: (transaction: StateTransaction) => T): Promise<T> {
    const { promise, resolve, reject } = Promise.withResolvers<T>();
    const member: Pending['edit'] = (transaction) => {
      const result = edit(transaction);
      return () => resolve(result);
    };
    this.#queue.push({ edit: member, reject });
    this.#running ??= this.#run();
    return promise;
  }

  /** Calls `look` once, while no commit runs, with the bytes of state.json as it is on disk. */
  between<T>(look: (bytes: Buffer) => T): Promise<T> {
    const { promise, resolve, reject } = Promise.withResolvers<T>();
    this.change(() => resolve(look(this.#file.bytesOf(this.#low.data)))).catch(reject);
    return promise;
  }

  /** Calls back after each committed change. The returned function stops this. */
  watch(watcher: () => void): () => void {
    this.#watchers.add(watcher);
    return () => void this.#watchers.delete(watcher);
  }

  /**
   * Sets the function that writes the outbox to history,
   * and writes the entries that an earlier run left there.
   */
  async drainTo(apply: Apply): Promise<void> {
    this.#apply = apply;
    await this.#drain();
  }

  /** Waits until all running commits have ended. */
  async close(): Promise<void> {
    while (this.#running) await this.#running;
    this.#cancelAgain();
    await this.#file.revert().catch(() => {});
  }

  async #run(): Promise<void> {
    do {
      const group = this.#queue;
      this.#queue = [];
      await this.#commit(group).catch((error: unknown) => {
        for (const member of group) member.reject(error);
      });
    } while (this.#queue.length > 0);
    this.#running = undefined;
  }

  async #commit(group: readonly Pending[]): Promise<void> {
    const { next, entries, done } = editAll(this.#committed, group);
    const changed = next !== this.#committed || entries.length > 0;
    if (changed) await this.#store(next, entries);
    await this.#finish();
    if (changed) for (const watcher of [...this.#watchers]) watcher();
    for (const resolve of done) resolve();
  }

  async #store(next: Declared, entries: readonly OutboxEntry[]): Promise<void> {
    const before = this.#low.data;
    this.#low.data = {
      ...before,
      generation: before.generation + 1,
      ...Object.fromEntries(names.map((name) => [name, [...next[name].values()]])),
      outbox: [...before.outbox.slice(this.#applied), ...entries],
    };
    try {
      await this.#low.write();
    } catch (cause) {
      this.#low.data = before;
      await this.#finish();
      throw this.#file.mayHoldFailed ? new Error('a failed change is not undone yet', { cause }) : cause;
    }
    this.#committed = next;
    Object.assign(this, next);
    this.#applied = 0;
  }

  /** Undoes a failed commit and writes the outbox to history. Whatever fails is tried again later. */
  async #finish(): Promise<void> {
    this.#cancelAgain();
    try {
      await this.#file.revert();
      await this.#drain();
    } catch {
      this.#cancelAgain = after(againMs, () => {
        this.#running ??= this.#run();
      });
    }
  }

  async #drain(): Promise<void> {
    const { outbox } = this.#low.data;
    if (!this.#apply || this.#applied === outbox.length) return;
    await this.#apply(outbox);
    this.#applied = outbox.length;
  }
}

/**
 * Runs each edit in its own transaction. An edit that throws is undone and rejected; the other edits go on.
 */
function editAll(base: Declared, group: readonly Pending[]) {
  let next = base;
  const entries: OutboxEntry[] = [];
  const done: (() => void)[] = [];
  for (const member of group) {
    const transaction = new StateTransaction(next);
    try {
      done.push(member.edit(transaction));
      next = transaction.after;
      entries.push(...transaction.entries);
    } catch (error) {
      member.reject(error);
    }
  }
  return { next, entries, done };
}

/**
 * Edits the documents. Replace a document and never edit it in place:
 * the committed state has the same object.
 */
export class StateTransaction implements Journal {
  /**
   * The documents before this change, including earlier changes of the same commit.
   * Rights are checked against these.
   */
  readonly before: Declared;
  /** Entries for history that are committed with this change. */
  readonly entries: OutboxEntry[] = [];
  /** The documents as this change leaves them. */
  after: Declared;
  /** Copies of the collections that this change has edited. */
  readonly #edited = new Map<Name, Map<string, Documents[Name][number]>>();

  constructor(before: Declared) {
    this.before = before;
    this.after = before;
  }

  get<N extends Name>(name: N, id: string): Documents[N][number] | undefined {
    return this.after[name].get(id);
  }

  all<N extends Name>(name: N): Documents[N][number][] {
    return [...this.after[name].values()];
  }

  put<N extends Name>(name: N, document: Documents[N][number]): void {
    this.#edit(name).set(document.id, document);
  }

  remove(name: Name, id: string): void {
    this.#edit(name).delete(id);
  }

  append(entry: OutboxEntry): void {
    this.entries.push(entry);
  }

  #edit(name: Name): Map<string, Documents[Name][number]> {
    const copy = this.#edited.get(name) ?? new Map<string, Documents[Name][number]>(this.after[name]);
    this.#edited.set(name, copy);
    this.after = { ...this.after, [name]: copy };
    return copy;
  }
}

/** The declared documents before a change of the state; undefined for a transaction of history. */
export function foundBy(journal: Journal): Declared | undefined {
  return journal instanceof StateTransaction ? journal.before : undefined;
}

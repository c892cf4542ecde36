// The declared documents (machines, keys, schedules and so on), in memory and in a store. Changes are
// committed in groups.
import type { Journal } from '../../shared/api/route-table.ts';
import { after } from '../../shared/clock.ts';
import type { OutboxEntry } from '../history/history.ts';
import { type Declared, type Documents, type Name, names } from './document-types.ts';
import { FileStore } from './file-documents.ts';
import type { Apply, StateStore } from './store-interface.ts';

export type {
  AlertChannel,
  AlertRule,
  Declared,
  JoinToken,
  Key,
  Login,
  Machine,
  MaintenanceWindow,
  Schedule,
  Webhook,
} from './document-types.ts';

interface Pending {
  /** Makes the change. The returned function resolves the caller's promise with the result. */
  edit(transaction: StateTransaction): () => void;
  reject(error: unknown): void;
}

/** Milliseconds after which a failed write of the outbox, or a failed undo of a commit, is tried again. */
const againMs = 2_000;

/**
 * Opens the state of a directory. Creates it if no broker has run there before. Throws StartError if
 * state.json is lost or damaged, or was edited by hand without `acceptEdit`.
 */
export async function openState(directory: string, acceptEdit = false): Promise<State> {
  return new State(await FileStore.open(directory, acceptEdit));
}

/** The committed documents. Each change replaces their collections; a collection is never edited in place. */
export class State implements Declared {
  readonly machines!: Declared['machines'];
  readonly keys!: Declared['keys'];
  readonly logins!: Declared['logins'];
  readonly join_tokens!: Declared['join_tokens'];
  readonly schedules!: Declared['schedules'];
  readonly webhooks!: Declared['webhooks'];
  readonly alert_rules!: Declared['alert_rules'];
  readonly alert_channels!: Declared['alert_channels'];
  readonly maintenance_windows!: Declared['maintenance_windows'];
  readonly #store: StateStore;
  readonly #watchers = new Set<() => void>();
  #committed: Declared;
  #queue: Pending[] = [];
  #running: Promise<void> | undefined;
  #cancelAgain = (): void => {};

  constructor(store: StateStore) {
    this.#store = store;
    const data = store.documents;
    const collections = names.map((name) => [name, new Map(data[name].map((one) => [one.id, one]))]);
    // The cast is safe: the name of a collection decides the type of its documents.
    this.#committed = Object.fromEntries(collections) as Declared;
    Object.assign(this, this.#committed);
  }

  get installId(): string {
    return this.#store.documents.install_id;
  }

  get generation(): number {
    return this.#store.documents.generation;
  }

  /**
   * Runs `edit`. Resolves with its result when the change is on disk and its outbox in the history. Changes
   * that arrive together share one commit. If the edit throws or the commit fails, nothing is changed. If the
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

  /** Calls `look` once while no commit runs, with the bytes of state.json as it is stored. */
  between<T>(look: (bytes: Buffer) => T): Promise<T> {
    const { promise, resolve, reject } = Promise.withResolvers<T>();
    this.change(() => resolve(look(this.#store.bytes()))).catch(reject);
    return promise;
  }

  /** Calls `watcher` after each committed change. Call the returned function to stop. */
  watch(watcher: () => void): () => void {
    this.#watchers.add(watcher);
    return () => void this.#watchers.delete(watcher);
  }

  /**
   * Sets the function that writes the outbox to history,
   * and writes the entries that an earlier run left there.
   */
  async drainTo(apply: Apply): Promise<void> {
    await this.#store.drainTo(apply);
  }

  /** Waits until all running commits have ended. */
  async close(): Promise<void> {
    while (this.#running) await this.#running;
    this.#cancelAgain();
    await this.#store.close();
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
    if (changed) await this.#write(next, entries);
    await this.#finish();
    if (changed) for (const watcher of [...this.#watchers]) watcher();
    for (const resolve of done) resolve();
  }

  async #write(next: Declared, entries: readonly OutboxEntry[]): Promise<void> {
    try {
      await this.#store.write(this.#committed, next, entries);
    } catch (cause) {
      await this.#finish();
      throw this.#store.isUndone ? cause : new Error('a failed change is not undone yet', { cause });
    }
    this.#committed = next;
    Object.assign(this, next);
  }

  /**
   * Undoes a failed commit and writes the outbox to the history. If one of the two fails, it is tried again
   * later.
   */
  async #finish(): Promise<void> {
    this.#cancelAgain();
    try {
      await this.#store.finish();
    } catch {
      this.#cancelAgain = after(againMs, () => {
        this.#running ??= this.#run();
      });
    }
  }
}

/**
 * Runs each edit in its own transaction. An edit that throws is undone and rejected. The other edits
 * continue.
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
 * Edits the documents. Replace a document and never change its object, because the committed state refers to
 * the same object.
 */
export class StateTransaction implements Journal {
  /**
   * The documents before this change, with the earlier changes of the same commit. Rights are checked against
   * these.
   */
  readonly before: Declared;
  /** Entries for history that are committed with this change. */
  readonly entries: OutboxEntry[] = [];
  /** The documents after this change. */
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

/** Returns the declared documents before a change of the state; undefined for a transaction of history. */
export function foundBy(journal: Journal): Declared | undefined {
  return journal instanceof StateTransaction ? journal.before : undefined;
}

// Provides the declared documents (machines, keys, schedules and so on) from memory. Changes that arrive together are
// committed to the store as a group.
import type { Journal } from '../../shared/api/route-table.ts';
import { after } from '../../shared/clock.ts';
import { databaseUnavailable } from '../history/group-commit.ts';
import type { OutboxEntry } from '../history/history-database.ts';
import { FileStore } from './documents-in-state-json.ts';
import { type Declared, type Documents, mapsOf, type Name } from './state-documents-schema.ts';
import type { Apply, Edited, StateStore, Version } from './store-interface.ts';

export type {
  AlertChannel,
  AlertRule,
  Declared,
  JoinToken,
  Key,
  Login,
  Machine,
  MaintenanceWindow,
  SavedCommand,
  Schedule,
  Webhook,
} from './state-documents-schema.ts';

interface Pending {
  /**
   * Makes the change in the transaction. Returns a function that resolves the caller's promise, to be called after the
   * commit.
   */
  edit(transaction: StateTransaction): () => void;
  reject(error: unknown): void;
}

/** Milliseconds until a failed write of the outbox, or a failed undo of a commit, is tried again. */
const againMs = 2_000;

/**
 * Opens or creates the state of a directory. Throws StartError if state.json is lost, damaged, or edited by hand
 * without `acceptEdit`.
 */
export async function openState(directory: string, acceptEdit = false): Promise<State> {
  return new State(await FileStore.open(directory, acceptEdit));
}

/** The committed documents. A change replaces whole collections; a collection is never edited in place. */
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
  readonly saved_commands!: Declared['saved_commands'];
  readonly #store: StateStore;
  readonly #watchers = new Set<() => void>();
  #committed: Version;
  #queue: Pending[] = [];
  /** Promise of the refresh that runs, or of the last one. */
  #refreshing = Promise.resolve();
  /** Promise of the refresh that starts after the running one; undefined if no refresh waits. */
  #nextRefresh: Promise<void> | undefined;
  #running: Promise<void> | undefined;
  #cancelAgain = (): void => {};

  constructor(store: StateStore) {
    this.#store = store;
    const data = store.documents;
    const declared = mapsOf(data);
    this.#committed = { declared, generation: data.generation, disconnects: 0 };
    Object.assign(this, declared);
    store.connection.onUnavailable(() => this.#rejectWaiting());
  }

  get installId(): string {
    return this.#store.documents.install_id;
  }

  get generation(): number {
    return this.#committed.generation;
  }

  /**
   * Resolves with the result of `edit` when the change is on disk; the history may get the change's outbox entries
   * later. If `edit` or the commit fails, nothing is changed.
   */
  change<T>(edit: (transaction: StateTransaction) => T): Promise<T> {
    const { promise, resolve, reject } = Promise.withResolvers<T>();
    const member: Pending['edit'] = (transaction) => {
      const result = edit(transaction);
      return () => resolve(result);
    };
    if (!this.#store.connection.isReady) reject(databaseUnavailable());
    else {
      // Changes that arrive while a commit runs share the next commit.
      this.#queue.push({ edit: member, reject });
      this.#running ??= this.#run();
    }
    return promise;
  }

  /**
   * Reads the changes of other brokers, without waiting for commits of this broker. Resolves immediately if no other
   * broker can use the store.
   */
  refresh(): Promise<void> {
    this.#nextRefresh ??= this.#refreshNext();
    return this.#nextRefresh;
  }

  /** Waits until no commit runs, then calls `look` with the bytes of state.json as it is stored. */
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
   * Sets the function that writes the outbox to the history. Then writes the entries that an earlier broker process
   * left in the outbox.
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

  /**
   * Rejects the waiting changes when the store stops answering. A running commit is not rejected here, because the
   * store ends it.
   */
  #rejectWaiting(): void {
    const rejected = this.#queue;
    this.#queue = [];
    for (const { reject } of rejected) reject(databaseUnavailable());
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

  async #refreshNext(): Promise<void> {
    await this.#refreshing.catch(() => {});
    this.#nextRefresh = undefined;
    if (!this.#store.connection.isReady) throw databaseUnavailable();
    this.#refreshing = this.#refresh();
    await this.#refreshing;
  }

  async #refresh(): Promise<void> {
    if (this.#replace(await this.#store.refresh(this.#committed))) this.#callWatchers();
  }

  async #commit(group: readonly Pending[]): Promise<void> {
    const done: (() => void)[] = [];
    let hasEntries = false;
    const next = await this.#change((newest) => {
      const edited = editAll(newest, group, done);
      hasEntries = edited.entries.length > 0;
      return edited;
    });
    const isChanged = this.#replace(next) || hasEntries;
    await this.#finish();
    if (isChanged) this.#callWatchers();
    for (const resolve of done) resolve();
  }

  async #change(edit: (newest: Declared) => Edited): Promise<Version> {
    try {
      return await this.#store.change(this.#committed, edit);
    } catch (cause) {
      await this.#finish();
      throw this.#store.isUndone
        ? cause
        : new Error(
            'a change of the state failed, and undoing it failed too; the broker tries to undo it again',
            { cause },
          );
    }
  }

  /** Sets the committed documents, unless newer ones have been set meanwhile. Returns true if the documents changed. */
  #replace(next: Version): boolean {
    const { declared, generation, disconnects } = this.#committed;
    if (next.disconnects < disconnects) return false;
    if (next.disconnects === disconnects && next.generation <= generation) return false;
    this.#committed = next;
    Object.assign(this, next.declared);
    return next.declared !== declared;
  }

  #callWatchers(): void {
    for (const watcher of [...this.#watchers]) watcher();
  }

  /**
   * Undoes the last commit if it failed, and writes the outbox to the history. If either fails, both are tried again
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
 * Runs each edit in a transaction of its own. If an edit throws, its caller's promise is rejected, and none of its
 * changes remains. For any other edit, adds a function to `done` that resolves the caller's promise.
 */
function editAll(base: Declared, group: readonly Pending[], done: (() => void)[]): Edited {
  let next = base;
  const entries: OutboxEntry[] = [];
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
  return { next, entries };
}

/**
 * Edits the documents. To change a document, put a new object: the old object belongs to the committed state, and must
 * stay unchanged.
 */
export class StateTransaction implements Journal {
  /**
   * The documents from which this change starts, including earlier changes of the same commit. Rights are checked
   * against these documents.
   */
  readonly before: Declared;
  /** Entries for the history that are committed with this change. */
  readonly entries: OutboxEntry[] = [];
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

/**
 * If `journal` is a state transaction, returns the documents from which its change starts. If it is a transaction of
 * the history alone, returns undefined.
 */
export function foundBy(journal: Journal): Declared | undefined {
  return journal instanceof StateTransaction ? journal.before : undefined;
}

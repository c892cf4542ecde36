// The interface of the stores for documents: a file (documents-in-state-json.ts) or PostgreSQL
// (documents-in-postgres.ts).
import type { Connection, OutboxEntry } from '../history/history-database.ts';
import type { Declared, Documents } from './state-documents-schema.ts';

/** Writes the outbox to the history. It may be called twice with the same entries. */
export type Apply = (entries: readonly OutboxEntry[]) => Promise<void>;

/** The result of a group of changes: the new documents, and the entries for the history. */
export interface Edited {
  next: Declared;
  entries: readonly OutboxEntry[];
}

/** The documents after a commit. */
export interface Version {
  declared: Declared;
  /**
   * Number of the commit. A later commit has a higher number, unless the connection to the database was lost in between
   * (see `disconnects`).
   */
  generation: number;
  /**
   * How often the connection to the database had been lost before the documents were read. After each loss, the
   * database may be a copy that lacks the last commits.
   */
  disconnects: number;
}

export interface StateStore {
  /** The documents as they were when the store was opened, or as this broker last stored them. */
  readonly documents: Documents;
  /** False while the store may still contain a change whose commit has failed. finish() removes such a change. */
  readonly isUndone: boolean;
  /**
   * While the store does not answer, State rejects each new change at once. It also rejects each new refresh. If a
   * refresh is running, State waits for its end before it rejects a new one.
   */
  readonly connection: Connection;
  /**
   * Calls `edit` once with the newest documents, and stores the result. Resolves with the stored documents. `current`
   * is the version at the opening of the store, or any version that change() or refresh() has returned.
   */
  change(current: Version, edit: (newest: Declared) => Edited): Promise<Version>;
  /**
   * Returns the newest version. If nothing was committed after `current`, that is `current` itself. Does not wait for
   * change().
   */
  refresh(current: Version): Promise<Version>;
  /**
   * Completes the last commit: undoes it if it failed, and writes the entries of the outbox to the history. After
   * finish() throws, it must be called again.
   */
  finish(): Promise<void>;
  /** Sets the function that writes the entries of the outbox to the history, and calls it if there are entries. */
  drainTo(apply: Apply): Promise<void>;
  /** Returns the stored documents as the bytes of a state.json file. */
  bytes(): Buffer;
  close(): Promise<void>;
}

// What State needs of the place where the documents are stored: a file (file-documents.ts) or PostgreSQL
// (postgres-documents.ts).
import type { OutboxEntry } from '../history/history.ts';
import type { Declared, Documents } from './documents.ts';

/** Writes the outbox to history. Entries may be written a second time. */
export type Apply = (entries: readonly OutboxEntry[]) => Promise<void>;

export interface StateStore {
  /** The documents as they are stored. */
  readonly documents: Documents;
  /** False if a change that failed may still be stored, until finish() succeeds. */
  readonly isUndone: boolean;
  /** Stores what differs from `before`, and entries for history. */
  write(before: Declared, next: Declared, entries: readonly OutboxEntry[]): Promise<void>;
  /** Undoes a failed change, and writes entries to history. Called again later if it throws. */
  finish(): Promise<void>;
  /** Sets the function that writes entries to history. */
  drainTo(apply: Apply): Promise<void>;
  /** The bytes of state.json with the documents as they are stored. */
  bytes(): Buffer;
  close(): Promise<void>;
}

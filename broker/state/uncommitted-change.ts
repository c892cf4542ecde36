// One change of the state before it is committed: reads and edits the declared documents.
import type { Journal } from '../../shared/api/route-table.ts';
import type { OutboxEntry } from '../history.ts';
import type { Declared, Documents, Name } from './documents.ts';

/**
 * Edits the documents. Replace a document and never edit it in place:
 * the committed state holds the same object.
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

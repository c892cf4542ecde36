// A change of the state under way: what it sees and edits, apart from what is committed.
import type { Journal } from '../../shared/api/index.ts';
import type { Entry } from '../history.ts';
import type { Declared, Documents, Name } from './documents.ts';

/** The declared documents as one change sees and edits them. Replace documents, never edit one in place. */
export class Draft implements Journal {
  /** As earlier changes left it, those of the same commit too: rights are judged from this. */
  readonly before: Declared;
  /** Observations that are committed with this change and applied to history. */
  readonly entries: Entry[] = [];
  #after: Declared;
  /** Copies of the collections that were written to; the documents themselves are shared. */
  readonly #edited = new Map<Name, Map<string, Documents[Name][number]>>();

  constructor(before: Declared) {
    this.before = before;
    this.#after = before;
  }

  /** What is declared once the change is committed. */
  get after(): Declared {
    return this.#after;
  }

  get<N extends Name>(name: N, id: string): Documents[N][number] | undefined {
    return this.#after[name].get(id);
  }

  all<N extends Name>(name: N): Documents[N][number][] {
    return [...this.#after[name].values()];
  }

  put<N extends Name>(name: N, document: Documents[N][number]): void {
    this.#edit(name).set(document.id, document);
  }

  remove(name: Name, id: string): void {
    this.#edit(name).delete(id);
  }

  append(entry: Entry): void {
    this.entries.push(entry);
  }

  #edit(name: Name): Map<string, Documents[Name][number]> {
    const copy = this.#edited.get(name) ?? new Map<string, Documents[Name][number]>(this.#after[name]);
    this.#edited.set(name, copy);
    this.#after = { ...this.#after, [name]: copy };
    return copy;
  }
}

/** What a change found, if the journal is that of one: a transaction of history finds no declared documents. */
export function foundBy(journal: Journal): Declared | undefined {
  return journal instanceof Draft ? journal.before : undefined;
}

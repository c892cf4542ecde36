// A change under way: what it sees and edits, apart from what is committed.
import type { Journal } from '../../shared/api/index.ts';
import type { Entry } from '../history.ts';
import { type Collections, type Declared, type Documents, type Name, names } from './documents.ts';

/** The declared things as a change sees and edits them. Replace documents, never edit one in place. */
export interface Draft extends Journal {
  /** As earlier changes left it, those of the same commit too: rights are judged from this. */
  readonly before: Declared;
  get<N extends Name>(name: N, id: string): Documents[N][number] | undefined;
  all<N extends Name>(name: N): Documents[N][number][];
  put<N extends Name>(name: N, document: Documents[N][number]): void;
  remove(name: Name, id: string): void;
  /** An observation that is committed with this change and applied to history. */
  append(entry: Entry): void;
}

/** Copies a collection when it is first written to; the documents themselves are shared. */
export function draftOf(base: Collections): { draft: Draft; entries: Entry[]; result(): Collections } {
  const edited = new Map<Name, Map<string, Documents[Name][number]>>();
  const entries: Entry[] = [];
  const read = (name: Name): ReadonlyMap<string, Documents[Name][number]> => edited.get(name) ?? base[name];
  const write = (name: Name): Map<string, Documents[Name][number]> => {
    const copy = edited.get(name) ?? new Map<string, Documents[Name][number]>(base[name]);
    edited.set(name, copy);
    return copy;
  };
  return {
    entries,
    // A collection's name decides the type of its documents; the generic methods of Draft keep the two together.
    draft: {
      before: { ...base, joinTokens: base.join_tokens },
      get: (name, id) => read(name).get(id),
      all: (name) => [...read(name).values()] as never,
      put: (name, document) => void write(name).set(document.id, document),
      remove: (name, id) => void write(name).delete(id),
      append: (entry) => void entries.push(entry),
    },
    result: () => Object.fromEntries(names.map((name) => [name, read(name)])) as unknown as Collections,
  };
}

/** What a change found, if the journal is that of one: of a transaction of history there is nothing declared to find. */
export function foundBy(journal: Journal): Declared | undefined {
  return isDraft(journal) ? journal.before : undefined;
}

function isDraft(journal: Journal): journal is Draft {
  return 'before' in journal;
}

// Finds documents by id, and makes the error for an id that no object has.
import type { IdNoun } from '../shared/api/shared-schemas.ts';
import { AppError } from '../shared/errors.ts';

/** Returns the error NOUN_not_found. The id may come from a request, so a long id is cut. */
export function notFound(noun: IdNoun, id: string): AppError {
  const message = `no ${noun.replace('_', ' ')} has the id ${id.slice(0, 200)}`;
  return new AppError(`${noun}_not_found`, message, { [`${noun}_id`]: id });
}

/** Returns the document with this id. Throws NOUN_not_found if there is none. */
export function found<T extends object>(documents: ReadonlyMap<string, T>, noun: IdNoun, id: string): T {
  const document = documents.get(id);
  if (document) return document;
  throw notFound(noun, id);
}

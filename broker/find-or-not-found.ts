// Finds documents by id, and makes the errors for an id that no object has and for an object beyond a limit.
import type { IdNoun } from '../shared/api/shared-schemas.ts';
import { AppError } from '../shared/errors.ts';

/** Returns the error NOUN_not_found. The id may come from a request, so a long id is cut. */
export function notFound(noun: IdNoun, id: string): AppError {
  const message = `no ${noun.replace('_', ' ')} has the id ${id.slice(0, 200)}`;
  return new AppError(`${noun}_not_found`, message, { [`${noun}_id`]: id });
}

/** Returns the error for a new object if there are already `most` of its kind, such as `alert rules`. */
export function tooMany(kind: string, most: number): AppError {
  const message = `there are already ${most} ${kind}, and no more are allowed: remove one first`;
  return new AppError('unavailable', message);
}

/** Returns the document with this id. Throws NOUN_not_found if there is none. */
export function found<T extends object>(documents: ReadonlyMap<string, T>, noun: IdNoun, id: string): T {
  const document = documents.get(id);
  if (document) return document;
  throw notFound(noun, id);
}

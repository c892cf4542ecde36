// Selects the fields that an update changes.

/** Returns the fields that a request has set, without those that are undefined. */
export function setFields<T extends object>(changes: T): { [K in keyof T]?: Exclude<T[K], undefined> } {
  const set = Object.entries(changes).filter(([, value]) => value !== undefined);
  // The cast is safe: the entries are those of `changes`.
  return Object.fromEntries(set) as { [K in keyof T]?: Exclude<T[K], undefined> };
}

/** True if a request sets no field, so that its update changes nothing. */
export const setsNothing = (changes: object): boolean => Object.keys(setFields(changes)).length === 0;

// Selects the fields of an object that have a value.

/** Copies an object without its undefined fields. */
export function definedFields<T extends object>(values: T): { [K in keyof T]?: Exclude<T[K], undefined> } {
  const defined = Object.entries(values).filter(([, value]) => value !== undefined);
  // The cast is safe: the entries are those fields of `values` that are defined.
  return Object.fromEntries(defined) as { [K in keyof T]?: Exclude<T[K], undefined> };
}

/** True if a request sets no field, so that its update changes nothing. */
export const setsNothing = (changes: object): boolean => Object.keys(definedFields(changes)).length === 0;

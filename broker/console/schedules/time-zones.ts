// The time zones of the browser, as choices of a field.
const zones: readonly string[] = ['UTC', ...Intl.supportedValuesOf('timeZone')];

export const browserTimeZone = Intl.DateTimeFormat().resolvedOptions().timeZone;

/** Returns the choices. They include the present zone, because the broker may know more zones than the browser. */
export const timeZoneOptions = (present: string): (readonly [value: string, text: string])[] =>
  [...new Set([present, ...zones])].map((zone) => [zone, zone] as const);

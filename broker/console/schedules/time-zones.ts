// The time zones of the browser, as choices of a field.
const zones: readonly string[] = ['UTC', ...Intl.supportedValuesOf('timeZone')];

export const browserTimeZone = Intl.DateTimeFormat().resolvedOptions().timeZone;

/** The choices, with the present zone among them: the broker may know zones that the browser does not. */
export const timeZoneOptions = (present: string): (readonly [value: string, text: string])[] =>
  [...new Set([present, ...zones])].map((zone) => [zone, zone] as const);

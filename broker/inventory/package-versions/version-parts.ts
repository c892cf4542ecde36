// Splits versions into epoch, version and release, and compares their parts.

/** Splits a version of the form [EPOCH:]VERSION[-RELEASE], which dpkg, rpm and pacman have in common. */
export function partsOf(text: string): { epoch: string; version: string; release: string | undefined } {
  const [, epoch = '0', rest = ''] = /^(?:(\d+):)?(.*)$/s.exec(text) ?? [];
  const dash = rest.lastIndexOf('-');
  if (dash < 0) return { epoch, version: rest, release: undefined };
  return { epoch, version: rest.slice(0, dash), release: rest.slice(dash + 1) };
}

/** Compares numbers of any length. A missing number counts as 0. */
export function compareNumbers(a: string, b: string): number {
  const [x, y] = [a.replace(/^0+/, ''), b.replace(/^0+/, '')];
  return x.length - y.length || compareTexts(x, y);
}

/** Compares texts by their code units. */
export const compareTexts = (x: string, y: string): number => (x < y ? -1 : Number(x > y));

// Compares versions as dpkg does (deb-version(7)).

/** Below 0 if `a` is older than `b`, above 0 if it is newer, 0 if they are equal. */
export function compareDeb(a: string, b: string): number {
  const [x, y] = [partsOf(a), partsOf(b)];
  return x.epoch - y.epoch || comparePart(x.upstream, y.upstream) || comparePart(x.revision, y.revision);
}

function partsOf(version: string): { epoch: number; upstream: string; revision: string } {
  const [, epoch = '0', rest = ''] = /^(?:(\d+):)?(.*)$/s.exec(version) ?? [];
  const dash = rest.lastIndexOf('-');
  if (dash < 0) return { epoch: Number(epoch), upstream: rest, revision: '' };
  return { epoch: Number(epoch), upstream: rest.slice(0, dash), revision: rest.slice(dash + 1) };
}

/** Compares in turn a part without digits, sign by sign, and a number, until one differs. */
function comparePart(a: string, b: string): number {
  const [x, y] = [segmentsOf(a), segmentsOf(b)];
  for (let at = 0; at < Math.max(x.length, y.length); at += 1) {
    const compare = at % 2 === 0 ? compareSigns : compareNumbers;
    const order = compare(x[at] ?? '', y[at] ?? '');
    if (order !== 0) return order;
  }
  return 0;
}

/** Parts without digits and numbers in turn. A text that starts with a number has an empty part before it. */
function segmentsOf(text: string): string[] {
  const segments: string[] = text.match(/\d+|\D+/g) ?? [];
  return /^\d/.test(text) ? ['', ...segments] : segments;
}

function compareSigns(a: string, b: string): number {
  for (let at = 0; at < Math.max(a.length, b.length); at += 1) {
    const order = rankOf(a[at]) - rankOf(b[at]);
    if (order !== 0) return order;
  }
  return 0;
}

/** A tilde sorts before the end of the text, and letters sort before all other signs. */
function rankOf(sign: string | undefined): number {
  if (sign === undefined) return 0;
  if (sign === '~') return -1;
  return /[a-z]/i.test(sign) ? sign.charCodeAt(0) : sign.charCodeAt(0) + 256;
}

/** Compares numbers of any length. An absent number is 0. */
export function compareNumbers(a: string, b: string): number {
  const [x, y] = [a.replace(/^0+/, ''), b.replace(/^0+/, '')];
  return x.length - y.length || (x < y ? -1 : Number(x > y));
}

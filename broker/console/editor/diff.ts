// Computes the difference of two texts by lines. The editor displays it if another person has saved the edited file.

interface DiffLine {
  kind: 'same' | 'mine' | 'theirs';
  text: string;
}

/** Maximum number of lines on each side that are compared one by one. Longer changes are listed as a whole. */
const mostLines = 1_000;
/** Number of unchanged lines listed around each change. */
const around = 3;

/** Returns the lines that only one of the texts has, with a few lines around them. */
export function diffOf(theirs: string, mine: string): DiffLine[] {
  const [old, next] = [theirs.split('\n'), mine.split('\n')];
  let start = 0;
  while (start < old.length && start < next.length && old[start] === next[start]) start += 1;
  let end = 0;
  const most = Math.min(old.length, next.length) - start;
  while (end < most && old[old.length - 1 - end] === next[next.length - 1 - end]) end += 1;
  const same = (lines: readonly string[]): DiffLine[] => lines.map((text) => ({ kind: 'same', text }));
  return [
    ...same(old.slice(Math.max(0, start - around), start)),
    ...changes(old.slice(start, old.length - end), next.slice(start, next.length - end)),
    ...same(old.slice(old.length - end, old.length - end + around)),
  ];
}

/** Computes the longest common subsequence by dynamic programming. */
function changes(theirs: readonly string[], mine: readonly string[]): DiffLine[] {
  const only = (kind: DiffLine['kind'], lines: readonly string[]): DiffLine[] =>
    lines.map((text) => ({ kind, text }));
  if (theirs.length > mostLines || mine.length > mostLines)
    return [...only('theirs', theirs), ...only('mine', mine)];
  const width = mine.length + 1;
  const lengths = new Uint16Array((theirs.length + 1) * width);
  const at = (i: number, j: number): number => lengths[i * width + j] ?? 0;
  for (let i = theirs.length - 1; i >= 0; i -= 1) {
    for (let j = mine.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] =
        theirs[i] === mine[j] ? at(i + 1, j + 1) + 1 : Math.max(at(i + 1, j), at(i, j + 1));
    }
  }
  const lines: DiffLine[] = [];
  let [i, j] = [0, 0];
  while (i < theirs.length && j < mine.length) {
    if (theirs[i] === mine[j]) {
      lines.push({ kind: 'same', text: theirs[i] ?? '' });
      i += 1;
      j += 1;
    } else if (at(i + 1, j) >= at(i, j + 1)) lines.push({ kind: 'theirs', text: theirs[i++] ?? '' });
    else lines.push({ kind: 'mine', text: mine[j++] ?? '' });
  }
  return [...lines, ...only('theirs', theirs.slice(i)), ...only('mine', mine.slice(j))];
}

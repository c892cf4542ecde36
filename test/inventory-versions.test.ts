// Comparisons of package versions by the rules of each distribution.
import { execFileSync } from 'node:child_process';
import { expect, test } from 'vitest';
import { compareApk } from '../broker/inventory/package-versions/apk.ts';
import { compareDeb } from '../broker/inventory/package-versions/deb.ts';
import { isBelow } from '../broker/inventory/package-versions/is-version-below.ts';
import { comparePacman } from '../broker/inventory/package-versions/pacman.ts';
import { compareRpm } from '../broker/inventory/package-versions/rpm.ts';
import { seeded } from './seeded-random.ts';
import { needs } from './skip-without-programs.ts';

type Compare = (a: string, b: string) => number;

/** Checks lines such as `1.0 < 1.1` in both directions. */
function check(compare: Compare, cases: string): void {
  for (const line of cases.trim().split('\n')) {
    const [a = '', sign = '', b = ''] = line.trim().split(' ');
    const order = sign === '<' ? -1 : Number(sign === '>');
    expect([line, Math.sign(compare(a, b)), Math.sign(compare(b, a))]).toEqual([line, order, 0 - order]);
  }
}

const pieces = ['0', '1', '2', '9', '10', '007', 'a', 'b', 'rc', 'Z', '.', '.', '+', '~', 'dfsg'];

/** Makes pairs of mostly similar versions from random pieces. `more` has the pieces of one kind of version. */
function randomPairs(count: number, isValid: RegExp, more: readonly string[]): [string, string][] {
  const next = seeded(27);
  const random = (n: number): number => Math.floor(next() * n);
  const all = [...pieces, ...more];
  const piece = (): string => all[random(all.length)] ?? '';
  const text = (): string => {
    const epoch = random(4) === 0 ? `${random(2)}:` : '';
    return `${epoch}${random(3)}${Array.from({ length: random(6) }, piece).join('')}-${random(3)}`;
  };
  const similar = (version: string): string => {
    const at = random(version.length);
    return random(3) ? version.slice(0, at + 1) + piece() + version.slice(at + 1) : text();
  };
  const pairs = Array.from({ length: count }, (): [string, string] => {
    const version = text();
    return [version, similar(version)];
  });
  return pairs.filter((pair) => pair.every((one) => isValid.test(one)));
}

/** Compares our order of each pair with the order that a script prints: a negative number, 0 or a positive number. */
function checkOrders(compare: Compare, pairs: readonly [string, string][], script: string): void {
  const input = pairs.map((pair) => `${pair.join(' ')}\n`).join('');
  const printed = execFileSync('sh', ['-c', script], { input, encoding: 'utf8' }).trim().split('\n');
  const orders = printed.map((order) => Math.sign(Number(order)));
  expect(pairs.map(([a, b]) => [a, b, Math.sign(compare(a, b))])).toEqual(
    pairs.map(([a, b], at) => [a, b, orders[at]]),
  );
  expect(new Set(orders).size).toBe(3);
}

needs('dpkg')(
  'versions of Debian are compared as dpkg does, for many random pairs',
  () => {
    const script = `while read -r a b; do
    if dpkg --compare-versions "$a" lt "$b"; then echo -1
    elif dpkg --compare-versions "$a" gt "$b"; then echo 1
    else echo 0; fi; done`;
    checkOrders(compareDeb, randomPairs(400, /^(\d+:)?\d[^:]*[^:-]$/, ['-', '~~']), script);
  },
  120_000,
);

needs('rpm')('versions of rpm are compared as rpm does, for many random pairs', () => {
  const lua = 'for line in io.lines() do print(rpm.vercmp(line:match("(%S+) (%S+)")) .. "\\n") end';
  const pairs = randomPairs(3_000, /^(\d+:)?[^:-]+-[^:-]+$/, ['^', '^^', '~~', '%', '_']);
  checkOrders(compareRpm, pairs, `rpm --eval '%{lua: ${lua}}' | grep .`);
});

needs('vercmp')('versions of pacman are compared as vercmp does, for many random pairs', () => {
  const pairs = randomPairs(400, /^(\d+:)?[^:-]+-[^:-]+$/, ['..', '@', '_', 'beta']);
  checkOrders(comparePacman, pairs, 'while read -r a b; do vercmp "$a" "$b"; done');
});

test('versions of rpm are compared as its manual says', () => {
  check(
    compareRpm,
    `1.0 = 1.0
    1.0 < 2.0
    2.0.1a > 2.0.1
    5.5p1 < 5.5p2
    5.5p1 < 5.5p10
    10xyz < 10.1xyz
    xyz10 < xyz10.1
    xyz.4 < 8
    xyz.4 < 2
    5.5p2 < 5.6p1
    6.0.rc1 > 6.0
    10b2 > 10a1
    1.0aa > 1.0a
    10.0001 = 10.1
    10.0001 < 10.0039
    4.999.9 < 5.0
    20101121 < 20101122
    2_0 = 2.0
    a+ = a_
    1.0~rc1 < 1.0
    1.0~rc1 < 1.0~rc2
    1.0~rc1~git123 < 1.0~rc1
    1.0^ > 1.0
    1.0^git1 < 1.0^git2
    1.0^git1 < 1.01
    1.0^20160101 < 1.0.1
    1.0~rc1^git1 > 1.0~rc1
    1.0^git1~pre < 1.0^git1
    1:1.0-1 > 2.0-1
    1.0-1 < 1.0-2
    1.0 = 1.0-2`,
  );
});

// Debian has no package of apk, so the table has recorded results. Its second half has random versions, compared by
// apk-tools 3 (src/version.c).
test('versions of apk are compared as apk does, by a recorded table', () => {
  check(
    compareApk,
    `1.2.3 = 1.2.3
    1.2 < 1.2.1
    1.9 < 1.10
    1.2a > 1.2
    1.2a < 1.2b
    1.2_rc1 < 1.2
    1.2_alpha < 1.2_beta
    1.2_pre2 < 1.2_rc1
    1.2_rc1 < 1.2_rc2
    1.2_p1 > 1.2
    1.2_git20240101 > 1.2
    1.2-r0 < 1.2-r1
    1.2-r9 < 1.2-r10
    1.2 < 1.2-r0
    1.05 < 1.5
    0.1.0_alpha < 0.1.3_alpha
    3.1.4-r5 < 3.1.4-r6
    2.0_alpha1_p2 > 2.0_alpha1
    20240203-r0 > 20230506-r0
    1a-r1 < 1a~1f-r1
    2.007.10_beta < 2.007.10_beta~1f
    0a~ab-r0 > 0a~aab-r0
    2.007a~1f < 2.007a~1f1
    2_alpha9~1f-r9 < 2_alpha9~1f1
    2.10.0_alpha_git > 2.10.0_alpha1
    10.007.1-r9 < 10.007.1-r91
    0.05 < 007.1_git-r0
    10 < 10~1f
    05-r007 = 05-r007
    0.0.2_pre05 > 0.0-r1
    05.9.007_hg_svn-r2 > 0.2a_p05
    05.1.1-r1 < 05.1.1.0-r1
    10.0.007 > 2_git_hg0-r9
    0.0.0-r2 < 0.00.0-r2
    0.9.1_pre_pre-r9 < 10.2.0_pre-r007
    1a < 1.1a
    9.10.007 > 9.10a
    05.1.9 > 05.1_rc
    05.0_pre10 < 05.0
    0.10 < 0.10a
    2_pre < 2_p-r1
    05.05_p < 05.05_p-r1
    1.1.0a-r0 > 1.1.0
    9.0.2 > 9.0_p
    9 < 91
    2.2.1b-r0 < 2.20
    10.05 < 10.05~1f
    05-r05 > 1`,
  );
});

test('versions of pacman are compared as vercmp(8) says', () => {
  check(
    comparePacman,
    `1.0a < 1.0b
    1.0b < 1.0beta
    1.0beta < 1.0p
    1.0p < 1.0pre
    1.0pre < 1.0rc
    1.0rc < 1.0
    1.0 < 1.0.a
    1.0.a < 1.0.1
    1 < 1.0
    1.0 < 1.1
    1.1 < 1.1.1
    1.1.1 < 1.2
    2.0 < 3.0.0
    1.5-1 = 1.5
    1.5-1 < 1.5-2
    1.5b-1 < 1.5-1
    1:1.0-1 > 2.0-1
    0:1.0 = 1.0
    1.0. > 1.0
    1..0 > 1.0
    2.0a < 2.0.a`,
  );
});

test('epochs are compared only if the limit has one', () => {
  expect(isBelow('rpm', '1:3.0.7-27.el9', '3.0.15')).toBe(true);
  expect(isBelow('rpm', '1:3.0.7-27.el9', '0:3.0.15')).toBe(false);
  expect(isBelow('deb', '3.0.15-1~deb12u1', '3.0.15')).toBe(false);
  expect(isBelow('deb', '3.0.15~rc1-1', '3.0.15')).toBe(true);
});

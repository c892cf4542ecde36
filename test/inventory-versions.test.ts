// Comparing versions of packages by the rules of the distributions.
import { execFileSync } from 'node:child_process';
import { expect, test } from 'vitest';
import { compareApk } from '../broker/inventory/versions/apk.ts';
import { compareDeb } from '../broker/inventory/versions/deb.ts';
import { isBelow } from '../broker/inventory/versions/index.ts';
import { comparePacman } from '../broker/inventory/versions/pacman.ts';
import { compareRpm } from '../broker/inventory/versions/rpm.ts';
import { needs } from './skip-without-programs.ts';

type Compare = (a: string, b: string) => number;

/** Checks lines such as `1.0 < 1.1`, each in both directions. */
function check(compare: Compare, cases: string): void {
  for (const line of cases.trim().split('\n')) {
    const [a = '', sign = '', b = ''] = line.trim().split(' ');
    const order = sign === '<' ? -1 : Number(sign === '>');
    expect([line, Math.sign(compare(a, b)), Math.sign(compare(b, a))]).toEqual([line, order, 0 - order]);
  }
}

/** A pseudo-random number below `n`; the same in every run. */
function createRandom(seed: number): (n: number) => number {
  let state = seed;
  return (n) => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return Math.floor((state / 2 ** 32) * n);
  };
}

needs('dpkg')(
  'versions of Debian are compared as dpkg does, for many random pairs',
  () => {
    const random = createRandom(27);
    const pieces = [
      '0',
      '1',
      '2',
      '9',
      '10',
      '007',
      'a',
      'b',
      'rc',
      'Z',
      '.',
      '.',
      '+',
      '~',
      '~~',
      '-',
      'dfsg',
    ];
    const text = (): string => {
      const epoch = random(4) === 0 ? `${random(2)}:` : '';
      const rest = Array.from({ length: random(6) }, () => pieces[random(pieces.length)]).join('');
      return `${epoch}${random(3)}${rest}${random(2) ? `-${random(3)}` : ''}`;
    };
    const similar = (version: string): string => {
      const at = random(version.length);
      return random(3)
        ? version.slice(0, at + 1) + pieces[random(pieces.length)] + version.slice(at + 1)
        : text();
    };
    const pairs = Array.from({ length: 400 }, () => {
      const version = text();
      return [version, similar(version)] as const;
    }).filter((pair) => pair.every((one) => /^(\d+:)?\d[^:]*$/.test(one) && !one.endsWith('-')));
    const script = `while read -r a b; do
    if dpkg --compare-versions "$a" lt "$b"; then echo -1
    elif dpkg --compare-versions "$a" gt "$b"; then echo 1
    else echo 0; fi; done`;
    const input = pairs.map((pair) => `${pair.join(' ')}\n`).join('');
    const orders = execFileSync('sh', ['-c', script], { input, encoding: 'utf8' })
      .trim()
      .split('\n')
      .map(Number);
    const own = pairs.map(([a, b]) => Math.sign(compareDeb(a, b)));
    expect(pairs.map((pair, at) => [...pair, own[at]])).toEqual(
      pairs.map((pair, at) => [...pair, orders[at]]),
    );
    expect(new Set(orders).size).toBe(3);
  },
  120_000,
);

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

test('versions of apk are compared by numbers, letter, suffixes and revision', () => {
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
    20240203-r0 > 20230506-r0`,
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

test('an epoch counts only if the limit has one', () => {
  expect(isBelow('rpm', '1:3.0.7-27.el9', '3.0.15')).toBe(true);
  expect(isBelow('rpm', '1:3.0.7-27.el9', '0:3.0.15')).toBe(false);
  expect(isBelow('deb', '3.0.15-1~deb12u1', '3.0.15')).toBe(false);
  expect(isBelow('deb', '3.0.15~rc1-1', '3.0.15')).toBe(true);
});

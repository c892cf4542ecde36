// Compares versions of packages by the rule of the machine's distribution.
import type { PackageFormat } from '../../../shared/api/inventory.ts';
import { compareApk } from './apk.ts';
import { compareDeb } from './deb.ts';
import { comparePacman } from './pacman.ts';
import { compareRpm } from './rpm.ts';

const rules: Readonly<Record<PackageFormat, (a: string, b: string) => number>> = {
  deb: compareDeb,
  rpm: compareRpm,
  apk: compareApk,
  pacman: comparePacman,
};

/**
 * True if `version` is older than `limit`. Epochs are compared only if `limit` has one, because users need not know a
 * distribution's epochs.
 */
export function isBelow(format: PackageFormat, version: string, limit: string): boolean {
  const compared = /^\d+:/.test(limit) ? version : version.replace(/^\d+:/, '');
  return rules[format](compared, limit) < 0;
}

// Checks that `farhand-broker doctor` and `farhand doctor --data-dir` share: the state of the service, and a warning if
// the broker's state may be in a database that was not checked.
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { type Finding, warn } from './check-result.ts';
import { unitState } from './service-check.ts';

const name = 'farhand-broker';

export const brokerUnit = (): Promise<Finding[]> =>
  unitState(name, 'it refuses its settings or a file of its data directory');

/** Returns how to start the broker. `unit`: the findings of brokerUnit(). */
export function startAdvice(unit: readonly Finding[]): string {
  return unit.some(({ state }) => state === 'fail')
    ? `fix the problem that the check “service” reports, then run systemctl start ${name}`
    : `start the service with “systemctl start ${name}”, or run “${name} --data-dir DIR”`;
}

/** Warns if a broker's directory has no state.json: the broker's state may be in a database that was not checked. */
export function uncheckedDatabase(dataDir: string): Finding[] {
  const has = (file: string): boolean => existsSync(join(dataDir, file));
  if (!has('authority.json') || has('state.json')) return [];
  const set = `run ${name} doctor with --database-url URL, or set FARHAND_DATABASE_URL`;
  return [
    warn(
      'database',
      `not checked: --database-url is not set, and ${dataDir} has no state.json`,
      `if the broker uses PostgreSQL, ${set}; if not, put state.json back from a backup`,
    ),
  ];
}

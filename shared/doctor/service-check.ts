// The check of a Farhand service in systemd, for the agent and the broker.
import { clean } from '../sanitize-text.ts';
import { runsSystemd, type State, stateOf } from '../systemd/control.ts';
import { type Finding, fail, ok, warn } from './check-result.ts';

/**
 * Checks the state of a Farhand service in systemd. Returns no finding on a machine without systemd. `refused`: the
 * reason in the finding if the service ended with exit code 78 (bad configuration).
 */
export async function unitState(name: string, refused: string): Promise<Finding[]> {
  if (!runsSystemd()) return [];
  const state = await stateOf(name).catch(() => undefined);
  if (!state)
    return [warn('service', 'systemctl does not answer', `run systemctl status ${name} to see why`)];
  return [ofUnit(name, state, refused)];
}

type UnitState = Pick<State, 'installed' | 'active' | 'status' | 'exitStatus' | 'result'>;

export function ofUnit(
  name: string,
  { installed, active, status, exitStatus, result }: UnitState,
  refused: string,
): Finding {
  if (!installed) return warn('service', `${name} is not installed`, `${name} install`);
  const isActive = active === 'active';
  const why = isActive ? '' : ` (${exitStatus === 78 ? refused : result})`;
  // The status is last, because it can end with a command to copy.
  const what = clean([`${name} is ${active}${why}`, status].filter(Boolean).join(': '));
  return isActive ? ok('service', what) : fail('service', what, `see journalctl -u ${name} -n 50`);
}

// Checks the state of a Farhand service in systemd; machines without systemd are skipped.
import { existsSync } from 'node:fs';
import { clean } from '../sanitize-text.ts';
import { stateOf } from '../systemd/control.ts';
import { type Finding, fail, ok, warn } from './finding.ts';

export async function unitState(name: string): Promise<Finding[]> {
  // systemd makes this directory when it boots a machine (sd_booted(3)).
  if (!existsSync('/run/systemd/system')) return [];
  const state = await stateOf(name).catch(() => undefined);
  if (!state) return [warn('service', 'systemctl does not answer', 'see systemctl status for the reason')];
  const { installed, active, status, exitStatus, result } = state;
  if (!installed) return [warn('service', `${name} is not installed`, `${name} install`)];
  const what = clean([`${name} is ${active}`, status].filter(Boolean).join(': '));
  if (active === 'active') return [ok('service', what)];
  const why = exitStatus === 78 ? 'its configuration is bad, or the machine was removed' : result;
  return [fail('service', `${what}: ${why}`, `see journalctl -u ${name} -n 50`)];
}

// What systemd says of one of our services, where there is systemd.
import { execFile } from 'node:child_process';
import { existsSync } from 'node:fs';
import { promisify } from 'node:util';
import { clean } from '../output.ts';
import { type Finding, fail, ok, warn } from './finding.ts';

const shown = ['LoadState', 'ActiveState', 'SubState', 'Result', 'StatusText', 'ExecMainStatus'];

export async function unitState(name: string): Promise<Finding[]> {
  // systemd makes it when it boots (sd_booted(3)).
  if (!existsSync('/run/systemd/system')) return [];
  const args = ['show', name, `--property=${shown.join(',')}`];
  const told = await promisify(execFile)('systemctl', args, { timeout: 5_000 }).catch(() => undefined);
  if (!told) return [warn('service', 'systemctl does not answer', 'systemctl status tells why')];
  const of: Record<string, string | undefined> = Object.fromEntries(
    told.stdout
      .split('\n')
      .map((line) => [line.split('=')[0] ?? '', line.slice(line.indexOf('=') + 1)] as const),
  );
  if (of.LoadState === 'not-found') return [warn('service', `${name} is not installed`, `${name} install`)];
  const what = clean(
    [`${name} is ${of.ActiveState} (${of.SubState})`, of.StatusText].filter(Boolean).join(': '),
  );
  if (of.ActiveState === 'active') return [ok('service', what)];
  const why = of.ExecMainStatus === '78' ? 'its configuration is bad, or the machine was removed' : of.Result;
  return [fail('service', `${what}: ${why}`, `journalctl -u ${name} -n 50 tells more`)];
}

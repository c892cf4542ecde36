// Runs systemctl, journalctl and other programs of the system, and reads the state and log of a service.
import { existsSync } from 'node:fs';
import { execa } from 'execa';
import { StartError } from '../errors.ts';
import { clean } from '../sanitize-text.ts';

export interface State {
  /** State of the service in systemd: `active`, `activating`, `failed` or `inactive`. */
  active: string;
  /** True if systemd finds a unit file of this name. */
  installed: boolean;
  enabled: boolean;
  since: string;
  /**
   * Status text that the program sent to systemd. Do not rely on it: if an agent is not root, the commands that it runs
   * can forge this text.
   */
  status: string;
  /** Version of the running program, from the end of its status text. */
  version: string | undefined;
  /** Result of systemd: `success`, or how the service failed. */
  result: string;
  exitStatus: number;
  restarts: number;
  user: string;
}

interface Ran {
  /** Exit code. Also 1 if the program could not be started, or if a signal ended it. */
  code: number;
  stdout: string;
  stderr: string;
}

/**
 * `timeout` is longer than the three minutes that a service may take to start. `cwd` is a directory that every user may
 * enter. After `sudo -u`, the current directory may be closed to the new user, and then no program could start in it.
 */
const options = { timeout: 200_000, cwd: '/', reject: false, stripFinalNewline: false } as const;

/** Runs a program of the system to its end. Never throws: after a failure, `code` is not 0. */
export async function run(file: string, args: readonly string[]): Promise<Ran> {
  const { exitCode = 1, stdout, stderr, originalMessage = '' } = await execa(file, args, options);
  return { code: exitCode, stdout, stderr: stderr || originalMessage };
}

/** Runs a program of the system and returns its stdout. Throws StartError if the program fails. */
export async function must(file: string, args: readonly string[]): Promise<string> {
  const { code, stdout, stderr } = await run(file, args);
  if (code !== 0) throw new StartError(`${file} ${args.join(' ')}: ${stderr.trim()}`, 1);
  return stdout;
}

/** `uninstall` ends its error message with this text if the machine has no systemd. */
export const noService = 'there is no service to remove';

/** True if systemd has booted this machine (sd_booted(3)). */
export const runsSystemd = (): boolean => existsSync('/run/systemd/system');

/** Throws StartError on a machine without systemd, or if `root` is required and this user is not root. */
export function needSystemd(
  verb: string,
  root: boolean,
  otherWay = 'run the program without a service',
): void {
  if (!runsSystemd()) {
    throw new StartError(`${verb} needs systemd, which does not run on this machine; ${otherWay}`, 1);
  }
  if (root && process.getuid?.() !== 0) throw new StartError(`${verb} must be run as root; use sudo`, 1);
}

export async function systemdVersion(): Promise<number> {
  return Number.parseInt((await must('systemctl', ['--version'])).replace(/^systemd /, ''), 10);
}

const properties = {
  active: 'ActiveState',
  load: 'LoadState',
  enabled: 'UnitFileState',
  since: 'StateChangeTimestamp',
  status: 'StatusText',
  result: 'Result',
  exitStatus: 'ExecMainStatus',
  restarts: 'NRestarts',
  user: 'User',
};

export async function stateOf(name: string): Promise<State> {
  const text = await must('systemctl', ['show', name, `--property=${Object.values(properties).join(',')}`]);
  const values = new Map(text.split('\n').map((line): [string, string] => split(line)));
  const value = (key: keyof typeof properties): string => values.get(properties[key]) ?? '';
  const [, status = '', version] = /^(.*?)(?: \((\d[\w.+-]*)\))?$/.exec(clean(value('status'))) ?? [];
  return {
    active: value('active'),
    installed: value('load') !== 'not-found',
    enabled: value('enabled') === 'enabled',
    since: value('since'),
    status,
    version,
    result: value('result'),
    exitStatus: Number(value('exitStatus')),
    restarts: Number(value('restarts')),
    user: value('user'),
  };
}

function split(line: string): [string, string] {
  const at = line.indexOf('=');
  return [line.slice(0, at), line.slice(at + 1)];
}

/**
 * Returns the last lines that a service has logged since the time `since` (ms since 1970); empty if the user may not
 * read the journal.
 */
export async function lastLines(name: string, count: number, since = 0): Promise<string[]> {
  const which = [`--unit=${name}`, `--lines=${count}`, `--since=@${(since / 1_000).toFixed(3)}`];
  const { stdout } = await run('journalctl', [...which, '--output=cat', '--no-pager', '--quiet']);
  return stdout
    .split('\n')
    .filter((line) => line !== '')
    .map(clean);
}

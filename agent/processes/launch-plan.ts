// Turns a request into a plan of what to start: program, user, directory and environment. Rejects a request that cannot
// be started, with the reason.
import { access, constants, readFile, stat } from 'node:fs/promises';
import { userInfo } from 'node:os';
import { resolve } from 'node:path';
import type { ProcessSpec__Output } from '../../proto/types/farhand/agent/v1/ProcessSpec.ts';
import type { TerminalSpec__Output } from '../../proto/types/farhand/agent/v1/TerminalSpec.ts';
import { errnoOf } from '../../shared/errors.ts';

/** The environment variable that marks every process of a command, so that a kill finds them all. */
export const marker = 'FARHAND_COMMAND_ID';

const defaultPath = '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin';

/** Thrown if it is certain that the process did not run. The message gives the reason. */
export class NotStarted extends Error {
  override readonly name = 'NotStarted';
}

interface Account {
  name: string;
  uid: number;
  gid: number;
  home: string;
  shell: string;
}

export interface Plan {
  file: string;
  args: string[];
  cwd: string;
  env: Record<string, string>;
  /** True if the program runs as another user than the agent. */
  foreign: boolean;
  /** The program that the request named, for messages. */
  program: string;
}

/** The agent's own account, which does not change while the agent runs. */
let own: Account | undefined;

/** Looks up everything needed to start a command. Rejects with NotStarted. */
export async function plan(id: string, spec: ProcessSpec__Output, mayRunAs: boolean): Promise<Plan> {
  own ??= ownAccount();
  const account =
    spec.user === '' || spec.user === own.name ? own : await otherAccount(spec.user, own, mayRunAs);
  const file = spec.direct ? spec.command : '/bin/sh';
  if (!file) throw new NotStarted('the request names no program; set `command`');
  // "--" ends the options of the shell, because a command may begin with "-".
  const args = spec.direct ? spec.args : ['-c', '--', spec.command];
  const cwd = spec.cwd ? place(spec.cwd, account.home) : await homeOrRoot(account);
  const env = environment(id, account, spec.env);
  const planned = { file, args, cwd, env, program: file, foreign: false };
  return account === own ? planned : switched(account, planned, spec.cwd !== '');
}

/**
 * Plans a terminal. Checks the program and the directory here: a shell starts the program, and would print errors about
 * them into the terminal.
 */
export async function terminalPlan(id: string, spec: TerminalSpec__Output): Promise<Plan> {
  own ??= ownAccount();
  const shell = spec.program || (await loginShell(own));
  const args = spec.program ? spec.args : ['-l', ...spec.args];
  const cwd = spec.cwd ? place(spec.cwd, own.home) : await homeOrRoot(own);
  const account = spec.program ? own : { ...own, shell };
  const env = environment(id, account, { TERM: 'xterm-256color', COLORTERM: 'truecolor', ...spec.env });
  const bad = await badDirectory(cwd);
  if (bad) throw new NotStarted(bad);
  const file = await find(shell, cwd, env.PATH ?? defaultPath);
  if (!file) throw new NotStarted(`program ${shell} was not found on the machine, or is not executable`);
  return { file, args, cwd, env, foreign: false, program: shell };
}

/** Returns the account's login shell. A service account, whose shell is nologin or false, gets bash or sh. */
async function loginShell({ shell }: Account): Promise<string> {
  const refuses = /\/(nologin|false)$/.test(shell);
  if (!refuses && (await find(shell, '/', ''))) return shell;
  return (await find('/bin/bash', '/', '')) ?? '/bin/sh';
}

async function otherAccount(name: string, own: Account, mayRunAs: boolean): Promise<Account> {
  if (!mayRunAs)
    throw new NotStarted('the agent does not allow commands as another user; add `user` to its --allow');
  if (own.uid !== 0)
    throw new NotStarted(`the agent runs as ${own.name}; only root may run commands as ${name}`);
  const account = await accountNamed(name);
  if (!account) throw new NotStarted(`user ${name} does not exist on this machine`);
  return account;
}

/**
 * Plans a command that runs as another user. setpriv(1) sets the user and the supplementary groups, because Node's
 * spawn cannot set these groups. Then setpriv executes a shell, which executes the program.
 */
async function switched({ uid, gid }: Account, planned: Plan, mustEnter: boolean): Promise<Plan> {
  const { file, args, cwd, env } = planned;
  const setpriv = await find('setpriv', '/', defaultPath);
  if (!setpriv)
    throw new NotStarted(
      'to run a command as another user, the agent needs setpriv; install util-linux on the machine',
    );
  // The directory and the program are checked here, because the shell would print errors about them on the command's
  // stderr.
  const bad = mustEnter && (await badDirectory(cwd));
  if (bad) throw new NotStarted(bad);
  const found = await find(file, cwd, env.PATH ?? defaultPath);
  if (!found) throw new NotStarted(`program ${file} was not found on the machine, or is not executable`);
  const entering = entered(planned, mustEnter, [found, ...args]);
  const options = [`--reuid=${uid}`, `--regid=${gid}`, '--init-groups', '--', ...entering.args];
  return { ...planned, file: setpriv, args: options, cwd: '/', env: entering.env, foreign: true };
}

/**
 * Builds the shell command that setpriv(1) runs as the user. The shell enters the directory, exports the
 * environment variables and executes the program.
 */
function entered({ cwd, env }: Plan, mustEnter: boolean, program: string[]): Pick<Plan, 'args' | 'env'> {
  const { [marker]: mark = '', ...variables } = env;
  const odd = Object.keys(variables).find((name) => !/^[A-Za-z_]\w*$/.test(name));
  if (odd !== undefined)
    throw new NotStarted(
      `environment variable "${odd}": for a command that runs as another user, the name must consist of letters, digits and _, and must not begin with a digit`,
    );
  // setpriv(1) starts as root, so a variable such as LD_PRELOAD (ld.so(8)) would make it run the user's code as root.
  // The variables are therefore passed as FARHAND_ENV_N, each with a text NAME=VALUE. The shell, which runs as the
  // user, exports NAME.
  const held = Object.entries(variables).map(([name, value], n): [string, string] => [
    `FARHAND_ENV_${n}`,
    `${name}=${value}`,
  ]);
  const script = [
    mustEnter ? 'cd -P -- "$0" || exit 126' : 'cd -P -- "$0" 2>/dev/null || cd /',
    // The shell itself has exported PWD and OLDPWD. They are removed, because the program gets only the variables of
    // `env`.
    'unset PWD OLDPWD',
    `export ${held.map(([name]) => `"$${name}"`).join(' ')}`,
    `unset ${held.map(([name]) => name).join(' ')}`,
    'exec "$@"',
  ].join('\n');
  return {
    // No variable is in the arguments, because every user can read the arguments of a process.
    args: ['/bin/sh', '-c', script, cwd, ...program],
    env: { ...Object.fromEntries(held), [marker]: mark },
  };
}

/** Returns the first executable called `name` in `path`, searched as by execvp(3). */
async function find(name: string, cwd: string, path: string): Promise<string | undefined> {
  const places = name.includes('/')
    ? [resolve(cwd, name)]
    : path.split(':').map((dir) => resolve(cwd, dir, name));
  for (const candidate of places) {
    const found = await stat(candidate).catch(() => undefined);
    if (found?.isFile() && (found.mode & 0o111) !== 0) return candidate;
  }
  return undefined;
}

/**
 * Returns the home directory. Returns `/` if the home directory cannot be entered, as is common for service accounts.
 */
function homeOrRoot({ home }: Account): Promise<string> {
  // The final "/." makes access(2) fail for a file. badDirectory() needs two system calls, and takes twice as long.
  return access(`${home}/.`, constants.X_OK).then(
    () => home,
    () => '/',
  );
}

function place(cwd: string, home: string): string {
  return resolve(home, cwd === '~' || cwd.startsWith('~/') ? `.${cwd.slice(1)}` : cwd);
}

/** Builds the environment from nothing, so that commands do not inherit the agent's tokens and NODE_OPTIONS. */
function environment(id: string, account: Account, wanted: Record<string, string>): Plan['env'] {
  for (const name of Object.keys(wanted)) {
    if (!name || name.includes('='))
      throw new NotStarted(`environment variable "${name}": the name must not be empty or contain "="`);
  }
  return {
    PATH: defaultPath,
    HOME: account.home,
    USER: account.name,
    LOGNAME: account.name,
    SHELL: account.shell,
    LANG: 'C.UTF-8',
    ...wanted,
    [marker]: id,
  };
}

/** Returns why the spawner could not start the program, as a text for the user. `errno`: for example ENOENT. */
export async function explain(errno: string, { cwd, program }: Plan): Promise<string> {
  const badCwd = await badDirectory(cwd);
  if (badCwd && ['ENOENT', 'ENOTDIR', 'EACCES'].includes(errno)) return badCwd;
  if (errno === 'ENOENT') {
    const there = program.includes('/') && (await stat(resolve(cwd, program)).catch(() => undefined));
    return there
      ? `program ${program}: its interpreter (or loader) was not found on the machine`
      : `program ${program} was not found on the machine`;
  }
  if (errno === 'EACCES' || errno === 'EPERM')
    return `program ${program} cannot be executed (permission denied)`;
  if (errno === 'E2BIG')
    return 'command, arguments and environment are too long for the kernel of this machine (E2BIG); pass long data as input or in a file';
  if (errno === 'ERR_INVALID_ARG_VALUE')
    return 'command, arguments, directory and environment must not contain NUL bytes';
  if (['EAGAIN', 'ENOMEM', 'EMFILE', 'ENFILE'].includes(errno))
    return `the machine is out of memory, processes or file descriptors (${errno}); try again later`;
  return `program ${program} could not be started (${errno})`;
}

async function badDirectory(cwd: string): Promise<string | undefined> {
  const found = await stat(cwd).catch((error: unknown) => errnoOf(error) ?? 'unknown');
  if (found === 'ENOENT') return `working directory ${cwd} does not exist`;
  if (typeof found === 'string') return `working directory ${cwd} cannot be entered (${found})`;
  if (!found.isDirectory()) return `working directory ${cwd} is not a directory`;
  const denied = await access(cwd, constants.X_OK).catch(() => true);
  return denied === true ? `working directory ${cwd} cannot be entered (permission denied)` : undefined;
}

/** Returns the account of the agent itself. In a container the uid may have no name; the number is then the name. */
function ownAccount(): Account {
  try {
    const { username, uid, gid, homedir, shell } = userInfo();
    return { name: username, uid, gid, home: homedir || '/', shell: shell || '/bin/sh' };
  } catch {
    const uid = process.getuid?.() ?? 0;
    return { name: String(uid), uid, gid: process.getgid?.() ?? 0, home: '/', shell: '/bin/sh' };
  }
}

/** The account called `name` in /etc/passwd; undefined if there is none. */
async function accountNamed(name: string): Promise<Account | undefined> {
  const lines = (await readFile('/etc/passwd', 'utf8')).split('\n');
  return lines.map(parseAccount).find((account) => account?.name === name);
}

function parseAccount(line: string): Account | undefined {
  const [name = '', , uid = '', gid = '', , home = '', shell = ''] = line.split(':');
  if (!name || !/^\d+$/.test(uid) || !/^\d+$/.test(gid)) return undefined;
  return { name, uid: Number(uid), gid: Number(gid), home: home || '/', shell: shell || '/bin/sh' };
}

// Installs a program as a systemd service, or uninstalls it.
import { existsSync, lstatSync, readFileSync } from 'node:fs';
import { chmod, mkdir, realpath, rm, rmdir } from 'node:fs/promises';
import { basename, dirname, join } from 'node:path';
import { monotonic, now, sleep } from '../clock.ts';
import { writeDurably } from '../durable-file.ts';
import { StartError } from '../errors.ts';
import * as layout from '../paths-in-checkout-or-package.ts';
import { type FileContent, readRegularFile } from '../read-regular-file.ts';
import {
  lastLines,
  must,
  needSystemd,
  noService,
  run,
  type State,
  stateOf,
  systemdVersion,
} from './control.ts';

export interface Service {
  /** Name of the service. Its unit, its account and its directory below /var/lib have the same name. */
  name: string;
  /** Home directory of the service's own account; absent if the account needs none. */
  home?: string;
  /**
   * A program that runs as root whenever `directory` gets files. The unit NAME.path waits for these files, and then
   * starts NAME.service, which runs the program.
   */
  helper?: { name: string; directory: string };
  /** True if the running service works, for example if an agent is linked. The installation waits for this. */
  settled(state: State): boolean;
}

interface UnitValues {
  /** Program and arguments of the service; the first is an absolute path. */
  command: readonly string[];
  user: string;
  /** Names of the template's blocks (`# if NAME` to `# end`) that become part of the unit. */
  blocks: readonly string[];
}

export interface Installation extends UnitValues {
  /** Directories that the unit hides from the service. */
  hidden: readonly string[];
  /** Content of the settings file, as TOML. */
  settings: string;
  /** A file that only the service's account may read. If `text` is undefined, the file stays as it is. */
  secret?: { file: string; text: string | undefined };
  /** How to install the units of `Service.helper`, which run as root. If absent, these units are removed. */
  helper?: {
    blocks: readonly string[];
    /** The program that the helper's unit runs, and its first arguments. The unit adds further arguments. */
    command: readonly string[];
    /** Creates the directory of `Service.helper` and its content. `account`: the user and group of the service. */
    prepare(account: Account): Promise<void>;
  };
}

export interface Report extends State {
  settled: boolean;
  log: string[];
}

const settleMs = 30_000;
const mostRestarts = 3;

export const dataOf = ({ name }: Pick<Service, 'name'>): string => `/var/lib/${name}`;
export const unitOf = ({ name }: Pick<Service, 'name'>): string => `/etc/systemd/system/${name}.service`;
const unitsOf = ({ helper }: Service): string[] =>
  helper ? [unitOf(helper), unitOf(helper).replace(/service$/, 'path')] : [];
export const settingsOf = ({ name }: Pick<Service, 'name'>): string =>
  `/etc/farhand/${name.replace('farhand-', '')}.toml`;

/**
 * Adds `--config` and the settings file of the installed service in front of the arguments. Returns the arguments
 * unchanged if they already have `--config`, or if the file does not exist.
 */
export function withSettingsOf(name: string, argv: readonly string[]): readonly string[] {
  const file = settingsOf({ name });
  return existsSync(file) && !argv.includes('--config') ? ['--config', file, ...argv] : argv;
}

/** Steps that undo an installation. They run from the last to the first. */
type Undo = (() => Promise<unknown>)[];

/** Writes unit and settings, starts the service and waits for it. Restores the previous state after a failure. */
export async function install(service: Service, installation: Installation): Promise<Report> {
  const { name } = service;
  await refuseHidden(installation);
  const files = [
    settingsOf(service),
    unitOf(service),
    unitsOf(service),
    installation.secret?.file ?? [],
  ].flat();
  // All files are read before the first change. If the service's account has replaced a file by a FIFO or link, the
  // installation fails here and has changed nothing.
  const old = new Map(
    await Promise.all(files.map(async (file) => [file, await readRegularFile(file)] as const)),
  );
  const before = await stateOf(name);
  const since = now();
  const undo: Undo = [];
  try {
    await putFiles(service, installation, { before, old, undo });
    undo.push(() =>
      must('systemctl', before.enabled ? ['stop', name] : ['disable', '--now', '--quiet', name]),
    );
    await must('systemctl', ['daemon-reload']);
    await must('systemctl', ['enable', '--quiet', name]);
    await startHelper(service, installation, undo);
    await must('systemctl', ['restart', name]);
    return await settle(service);
  } catch (error) {
    const lines = (await lastLines(name, 20, since)).map((line) => `  ${line}`);
    const left = before.installed
      ? 'The previous installation was restored.'
      : 'Everything that the installation had created was removed.';
    const failures = await rollBack(undo);
    const end = failures.length === 0 ? [left] : ['Some changes could not be undone:', ...failures];
    throw new StartError([messageOf(error), ...lines, ...end].join('\n'), 1);
  }
}

/** Creates the account, and writes data directory, settings, unit and secret. Adds the undo step of each. */
async function putFiles(
  service: Service,
  installation: Installation,
  { before, old, undo }: { before: State; old: ReadonlyMap<string, FileContent | undefined>; undo: Undo },
): Promise<void> {
  const { settings, secret } = installation;
  const account = await accountOf(service, installation.user, undo);
  const directory = lstatSync(dataOf(service), { throwIfNoEntry: false });
  if (!directory) undo.push(() => must('rm', ['-rf', '--', dataOf(service)]));
  undo.push(() => restore(service.name, before.active));
  // From here on, the service's account owns the directory, and an undo step of accountOf() may remove this account.
  // Before that, the undo step below restores the directory's old owner.
  if (directory) undo.push(() => takeOver(service.name, dataOf(service), directory));
  await takeOver(service.name, dataOf(service), account);
  const put: Put = async (file, content) => {
    undo.push(() => place(file, old.get(file)));
    await place(file, content);
  };
  const unit = unitText(`${service.name}.service`, await systemdVersion(), installation);
  await put(settingsOf(service), { text: settings, mode: 0o640, uid: 0, gid: account.gid });
  await put(unitOf(service), { text: unit, mode: 0o644, uid: 0, gid: 0 });
  await putHelper(service, installation, account, { put, undo });
  if (secret?.text === undefined) return;
  await put(secret.file, { text: secret.text, mode: 0o600, uid: account.uid, gid: account.gid });
}

type Put = (file: string, content: FileContent | undefined) => Promise<void>;

/** Installs the units of `Service.helper`, or removes them if the installation has no `helper`. */
async function putHelper(
  service: Service,
  { helper: planned, user }: Installation,
  account: Account,
  { put, undo }: { put: Put; undo: Undo },
): Promise<void> {
  if (!service.helper) return;
  const { name, directory } = service.helper;
  const present = existsSync(directory);
  if (!planned && unitsOf(service).some((file) => existsSync(file)))
    await run('systemctl', ['disable', '--now', '--quiet', `${name}.path`]);
  if (planned && !present) undo.push(() => must('rm', ['-rf', '--', directory]));
  await planned?.prepare(account);
  const version = await systemdVersion();
  for (const file of unitsOf(service)) {
    const text = planned && unitText(basename(file), version, { ...planned, user });
    await put(file, text === undefined ? undefined : { text, mode: 0o644, uid: 0, gid: 0 });
  }
}

async function startHelper(
  { helper }: Service,
  { helper: planned }: Installation,
  undo: Undo,
): Promise<void> {
  if (!helper || !planned) return;
  const unit = `${helper.name}.path`;
  const { code } = await run('systemctl', ['is-enabled', '--quiet', unit]);
  if (code !== 0) undo.push(() => must('systemctl', ['disable', '--now', '--quiet', unit]));
  await must('systemctl', ['enable', '--now', '--quiet', unit]);
}

/**
 * Returns the account `user`. If it is missing and is the service's own, creates it, with a home directory if the
 * service needs one. Throws StartError if any other account is missing.
 */
async function accountOf({ name, home }: Service, user: string, undo: Undo): Promise<Account> {
  const found = await findAccount(user);
  if (found) return found;
  if (user !== name)
    throw new StartError(`--user ${user}: this machine has no such user; create it first`, 1);
  const where = home ? ['--create-home', `--home-dir=${home}`] : ['--no-create-home', '--home-dir=/'];
  await must('useradd', ['--system', '--user-group', ...where, '--shell=/usr/sbin/nologin', user]);
  const made = await findAccount(user);
  if (!made) {
    const problem = `useradd succeeded, but getent finds no user ${user}`;
    throw new StartError(`${problem}; check the user databases in /etc/nsswitch.conf`, 1);
  }
  undo.push(() => removeAccount(user, home));
  return made;
}

async function rollBack(undo: Undo): Promise<string[]> {
  const failures: string[] = [];
  for (const step of undo.reverse()) {
    await step().catch((error: unknown) => failures.push(`  ${messageOf(error)}`));
  }
  return failures;
}

const messageOf = (error: unknown): string => (error instanceof Error ? error.message : String(error));

/**
 * Throws if the service could not read a file of its command line, because the unit hides the directory (for example by
 * ProtectHome). Without this check, only the systemd journal would say why the service fails.
 */
async function refuseHidden({ command, hidden }: Installation): Promise<void> {
  for (const word of command.filter((one) => one.startsWith('/'))) {
    const real = await realpath(word).catch(() => word);
    const above = hidden.find((directory) => real.startsWith(`${directory}/`));
    if (above) {
      throw new StartError(
        `${real}: the service cannot read files below ${above}; move the program, for example to /opt`,
      );
    }
  }
}

/** Makes systemd read the unit files again. Restarts the service if it was running. `active`: its earlier state. */
async function restore(name: string, active: string): Promise<void> {
  await must('systemctl', ['daemon-reload']);
  await run('systemctl', ['reset-failed', name]);
  if (['active', 'activating', 'reloading'].includes(active)) await must('systemctl', ['restart', name]);
}

async function settle({ name, settled }: Service): Promise<Report> {
  for (const until = monotonic() + settleMs; ; await sleep(200)) {
    const state = await stateOf(name);
    if (state.active === 'failed' || state.restarts >= mostRestarts) {
      throw new StartError(`${name} fails at every restart: ${state.status || state.result}`, 1);
    }
    const good = state.active === 'active' && settled(state);
    if (good || monotonic() > until) return { ...state, settled: good, log: await lastLines(name, 5) };
  }
}

/** Stops the service and removes all its files. With `keep`, its data, settings and account stay. */
export async function uninstall(service: Service, keep: boolean): Promise<void> {
  needSystemd('uninstall', true, noService);
  const { name, home, helper } = service;
  if (helper) await run('systemctl', ['disable', '--now', '--quiet', `${helper.name}.path`]);
  // Directories of drop-ins, including those of `systemctl edit`.
  const places = ['/etc/systemd/system', '/etc/systemd/system.control', '/run/systemd/system'];
  await run('systemctl', ['disable', '--now', '--quiet', name]);
  const dropIns = places.map((one) => `${one}/${name}.service.d`);
  await must('rm', ['-rf', '--', unitOf(service), ...unitsOf(service), ...dropIns]);
  await must('systemctl', ['daemon-reload']);
  await run('systemctl', ['reset-failed', name]);
  if (keep) return;
  // Node's own removal is unsafe here: the owner of the directory could redirect it to another path.
  await must('rm', ['-rf', '--', dataOf(service), ...(helper ? [helper.directory] : [])]);
  await place(settingsOf(service), undefined);
  await removeAccount(name, home).catch((error: unknown) => {
    const way = `end the processes of user ${name}, then uninstall again`;
    const rest = 'everything else of the service was removed';
    throw new StartError(`user ${name} could not be removed (${messageOf(error)}); ${rest}; ${way}`, 1);
  });
}

/**
 * Returns the text of a unit, such as `farhand-agent.service`, with the values filled in. `systemd`: the version of
 * systemd.
 */
export function unitText(unit: string, systemd: number, { command, user, blocks }: UnitValues): string {
  const folder = unit.startsWith('farhand-agent') ? 'agent' : 'broker';
  const file = layout.shipped(unit, () => join(layout.home, folder, unit));
  const applies = [...blocks, ...(systemd >= 254 ? ['systemd-254'] : [])];
  return readFileSync(file, 'utf8')
    .replace(/^# if ([\w-]+)\n([\s\S]*?)^# end\n/gm, (_whole, block: string, lines: string) =>
      applies.includes(block) ? lines : '',
    )
    .replace(/^# .* fills in .*\n/, '')
    .replace('@COMMAND@', () => command.map(quoted).join(' '))
    .replace('@USER@', () => user);
}

/** Quotes a word of a command line for systemd (systemd.service(5), Command lines). */
function quoted(word: string): string {
  const plain = word.replaceAll('%', '%%').replaceAll('$', '$$$$');
  return /^[\w@%+=:,./$-]+$/.test(plain) ? plain : `"${plain.replace(/[\\"]/g, '\\$&')}"`;
}

/** Replaces a file. Without `content`, removes the file, and also its directory if that is then empty. */
export async function place(file: string, content: FileContent | undefined): Promise<void> {
  const directory = dirname(file);
  if (!content) {
    await rm(file, { force: true });
    return await rmdir(directory).catch(() => {});
  }
  const { text, mode, uid, gid } = content;
  const made = await mkdir(directory, { recursive: true });
  // The administrator's umask may have closed the new directory to the service's account, which must be able to enter
  // it.
  if (made) await chmod(directory, 0o755);
  await writeDurably(file, text, { mode, owner: { uid, gid } });
}

// ---- The account that a service runs as

interface Account {
  uid: number;
  gid: number;
}

/** Removes an account with its group and home. Throws StartError while a process of the account runs. */
async function removeAccount(name: string, home: string | undefined): Promise<void> {
  if (home) await must('rm', ['-rf', '--', home]);
  if (await findAccount(name)) await must('userdel', [name]);
  // userdel does not remove a group that has other members.
  if ((await run('getent', ['group', name])).code === 0) await must('groupdel', [name]);
}

async function findAccount(name: string): Promise<Account | undefined> {
  // getent also finds an account by its user id, so a number is not accepted as a name.
  if (!/^[A-Za-z_][\w.-]*$/.test(name)) return undefined;
  const { code, stdout } = await run('getent', ['passwd', name]);
  const [found, , uid, gid] = stdout.trim().split(':');
  return code === 0 && found ? { uid: Number(uid), gid: Number(gid) } : undefined;
}

/**
 * Makes `uid` and `gid` the owner of a data directory that belongs to another user, and stops the service first. Does
 * nothing if the directory is missing or belongs to root.
 */
async function takeOver(service: string, directory: string, { uid, gid }: Account): Promise<void> {
  const owner = lstatSync(directory, { throwIfNoEntry: false })?.uid;
  if (owner === undefined || owner === uid || owner === 0) return;
  await run('systemctl', ['stop', service]);
  // The old owner loses access first, so that it can change nothing while the content gets its new owner.
  await must('chown', ['--no-dereference', '0:0', '--', directory]);
  await must('chmod', ['0700', '--', directory]);
  // The new owner may be root. A link, FIFO or socket that the old owner left could make it open a file elsewhere.
  const ofNoUse = ['!', '-type', 'd', '!', '-type', 'f', '!', '-uid', '0'];
  await must('find', [directory, '-mindepth', '1', ...ofNoUse, '-delete']);
  await must('chown', ['--recursive', '--no-dereference', `${uid}:${gid}`, '--', directory]);
}

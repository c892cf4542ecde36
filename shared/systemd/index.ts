// A program of ours as a service of systemd: put there, looked at, and taken away without a trace.
import { existsSync } from 'node:fs';
import { realpath } from 'node:fs/promises';
import { monotonic, now, sleep } from '../clock.ts';
import { StartError } from '../errors.ts';
import { haveAccount, removeAccount } from './accounts.ts';
import {
  complaints,
  lastLines,
  must,
  needSystemd,
  run,
  type State,
  stateOf,
  systemdVersion,
} from './control.ts';
import { type Content, contentOf, place } from './files.ts';

export { needSystemd, type State } from './control.ts';
export { unitText } from './unit.ts';

export interface Service {
  /** Also its unit, its own account and its directory below /var/lib. */
  name: string;
  /** Of its own account, where that needs one. */
  home?: string;
}

export interface Installation {
  user: string;
  /** What the unit starts. */
  command: readonly string[];
  /** Directories that the service does not see. */
  hidden: readonly string[];
  unit(systemd: number): string;
  /** TOML. */
  settings: string;
  /** A file of the account's alone. */
  secret?: { file: string; text: string } | undefined;
  /** Whether a running one has come as far as it should. */
  settled(state: State): boolean;
}

export interface Report extends State {
  settled: boolean;
  log: string[];
}

const settleMs = 30_000;
/** One that came back that often has no good start. */
const mostRestarts = 3;

export const dataOf = ({ name }: Service): string => `/var/lib/${name}`;
const unitOf = ({ name }: Service): string => `/etc/systemd/system/${name}.service`;
export const settingsOf = ({ name }: Service): string => `/etc/farhand/${name.replace('farhand-', '')}.toml`;

/** Takes back what was done, the last first. */
type Undo = (() => Promise<unknown>)[];

/** Writes unit and settings, starts it, and waits for it; what fails leaves everything as it was. */
export async function install(service: Service, wish: Installation): Promise<Report> {
  await refuseHidden(wish);
  const before = await stateOf(service.name);
  const since = now();
  const undo: Undo = [];
  try {
    await putFiles(service, wish, before, undo);
    undo.push(() => stop(service.name, before.enabled));
    await begin(service.name);
    return await settle(service.name, wish.settled);
  } catch (error) {
    const lines = (await complaints(service.name, since)).map((line) => `  ${line}`);
    const left = before.installed
      ? 'What was installed before is back.'
      : 'Nothing of it is left but the program itself.';
    const failures = await rollBack(undo);
    const end = failures.length === 0 ? [left] : ['Not everything could be taken back:', ...failures];
    throw new StartError([messageOf(error), ...lines, ...end].join('\n'), 1);
  }
}

/** Account, settings, unit and secret. */
async function putFiles(service: Service, wish: Installation, before: State, undo: Undo): Promise<void> {
  const { user, settings, secret } = wish;
  const account = await haveAccount(user, user === service.name, service.home);
  if (account.fresh) undo.push(() => removeAccount(user, service.home));
  if (!existsSync(dataOf(service))) undo.push(() => must('rm', ['-rf', '--', dataOf(service)]));
  undo.push(() => restore(service.name, before.active));
  const put = async (file: string, content: Content): Promise<void> => {
    const old = await contentOf(file);
    undo.push(() => place(file, old));
    await place(file, content);
  };
  await put(settingsOf(service), { text: settings, mode: 0o640, uid: 0, gid: account.gid });
  await put(unitOf(service), { text: wish.unit(await systemdVersion()), mode: 0o644, uid: 0, gid: 0 });
  if (secret) await put(secret.file, { text: secret.text, mode: 0o600, uid: account.uid, gid: account.gid });
}

async function rollBack(undo: Undo): Promise<string[]> {
  const failures: string[] = [];
  for (const step of undo.reverse()) {
    await step().catch((error: unknown) => failures.push(`  ${messageOf(error)}`));
  }
  return failures;
}

const messageOf = (error: unknown): string => (error instanceof Error ? error.message : String(error));

/** A start that fails by what the unit itself takes away would only say so in the journal. */
async function refuseHidden({ command, hidden }: Installation): Promise<void> {
  for (const word of command.filter((one) => one.startsWith('/'))) {
    const real = await realpath(word).catch(() => word);
    const above = hidden.find((directory) => real.startsWith(`${directory}/`));
    if (above) {
      throw new StartError(
        `${real}: as a service it sees nothing below ${above}; put it elsewhere, as in /opt`,
      );
    }
  }
}

/** Stops it and takes everything away; `keep`: its data, settings and account stay. */
export async function uninstall(service: Service, keep: boolean): Promise<void> {
  needSystemd('uninstall', true);
  const { name, home } = service;
  // Also what an administrator has added, by hand or by `systemctl edit` and `set-property`.
  const places = ['/etc/systemd/system', '/etc/systemd/system.control', '/run/systemd/system'];
  await run('systemctl', ['disable', '--now', '--quiet', name]);
  await must('rm', ['-rf', '--', unitOf(service), ...places.map((place) => `${place}/${name}.service.d`)]);
  await must('systemctl', ['daemon-reload']);
  await run('systemctl', ['reset-failed', name]);
  if (keep) return;
  // Not by Node: whoever owns the directory could lead it elsewhere while it walks.
  await must('rm', ['-rf', '--', dataOf(service)]);
  await place(settingsOf(service), undefined);
  await removeAccount(name, home).catch((error: unknown) => {
    const way = `end what still runs as ${name}, then uninstall once more`;
    throw new StartError(`all but its user is gone: ${messageOf(error)}; ${way}`, 1);
  });
}

export async function report(service: Service, settled: (state: State) => boolean): Promise<Report> {
  needSystemd('status', false);
  const state = await stateOf(service.name);
  return { ...state, settled: settled(state), log: await lastLines(service.name, 5) };
}

async function begin(name: string): Promise<void> {
  await must('systemctl', ['daemon-reload']);
  await must('systemctl', ['enable', '--quiet', name]);
  await must('systemctl', ['restart', name]);
}

async function stop(name: string, stays: boolean): Promise<void> {
  await must('systemctl', stays ? ['stop', name] : ['disable', '--now', '--quiet', name]);
}

/** The unit that was there before, or none. */
async function restore(name: string, active: string): Promise<void> {
  await must('systemctl', ['daemon-reload']);
  await run('systemctl', ['reset-failed', name]);
  if (['active', 'activating', 'reloading'].includes(active)) await must('systemctl', ['restart', name]);
}

async function settle(name: string, settled: Installation['settled']): Promise<Report> {
  for (const until = monotonic() + settleMs; ; await sleep(200)) {
    const state = await stateOf(name);
    if (state.active === 'failed' || state.restarts >= mostRestarts) {
      throw new StartError(`${name} does not stay up: ${state.status || state.result}`, 1);
    }
    const good = state.active === 'active' && settled(state);
    if (good || monotonic() > until) return { ...state, settled: good, log: await lastLines(name, 5) };
  }
}

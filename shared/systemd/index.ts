// A program of ours as a service of systemd: put there, looked at, and taken away without a trace.
import { existsSync } from 'node:fs';
import { monotonic, sleep } from '../clock.ts';
import { StartError } from '../errors.ts';
import { type Account, haveAccount, removeAccount } from './accounts.ts';
import { lastLines, must, needSystemd, run, type State, stateOf, systemdVersion } from './control.ts';
import { contentOf, place } from './files.ts';

export type { Account } from './accounts.ts';
export { needSystemd, type State } from './control.ts';
export { contentOf, place } from './files.ts';
export { unitText } from './unit.ts';

export interface Service {
  /** Also its unit, its own account and its directory below /var/lib. */
  name: string;
  /** Of its own account, where that needs one. */
  home?: string;
}

export interface Installation {
  user: string;
  unit(systemd: number): string;
  /** TOML. */
  settings: string;
  /** Between the files and the start. */
  prepare?(account: Account): Promise<void>;
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
export const unitOf = ({ name }: Service): string => `/etc/systemd/system/${name}.service`;
export const settingsOf = ({ name }: Service): string => `/etc/farhand/${name.replace('farhand-', '')}.toml`;

/** Writes unit and settings, starts it, and waits for it; what fails leaves everything as it was. */
export async function install(service: Service, wish: Installation): Promise<Report> {
  const { name } = service;
  const [oldUnit, oldSettings] = [await contentOf(unitOf(service)), await contentOf(settingsOf(service))];
  const hadData = existsSync(dataOf(service));
  const account = await haveAccount(wish.user, wish.user === name, service.home);
  const root = { uid: 0, gid: 0 };
  try {
    await place(settingsOf(service), { text: wish.settings, mode: 0o640, uid: 0, gid: account.gid });
    await place(unitOf(service), { text: wish.unit(await systemdVersion()), mode: 0o644, ...root });
    await wish.prepare?.(account);
    await begin(name);
    return await settle(name, wish.settled);
  } catch (error) {
    const lines = (await lastLines(name, 10)).map((line) => `  ${line}`);
    const reason = error instanceof Error ? error.message : String(error);
    if (!oldUnit) await withdraw(service, { data: !hadData, account: account.fresh });
    await place(settingsOf(service), oldSettings);
    if (oldUnit) await place(unitOf(service), oldUnit);
    if (oldUnit) await begin(name);
    const left = oldUnit ? 'What was installed before is back.' : 'Nothing of it is left.';
    throw new StartError([reason, ...lines, left].join('\n'), 1);
  }
}

/** Stops it and takes everything away; `keep`: its data, settings and account stay. */
export async function uninstall(service: Service, keep: boolean): Promise<void> {
  needSystemd('uninstall', true);
  await withdraw(service, { data: !keep, account: !keep });
  if (!keep) await place(settingsOf(service), undefined);
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

async function withdraw(service: Service, goes: { data: boolean; account: boolean }): Promise<void> {
  const { name, home } = service;
  // Also what an administrator has added, by hand or by `systemctl edit` and `set-property`.
  const places = ['/etc/systemd/system', '/etc/systemd/system.control', '/run/systemd/system'];
  await run('systemctl', ['disable', '--now', '--quiet', name]);
  await must('rm', ['-rf', '--', unitOf(service), ...places.map((place) => `${place}/${name}.service.d`)]);
  await must('systemctl', ['daemon-reload']);
  await run('systemctl', ['reset-failed', name]);
  // Not by Node: whoever owns the directory could lead it elsewhere while it walks.
  if (goes.data) await must('rm', ['-rf', '--', dataOf(service)]);
  if (goes.account) await removeAccount(name, home);
}

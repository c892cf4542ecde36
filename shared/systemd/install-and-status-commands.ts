// Runs the service verbs of agent and broker: install, status, uninstall, and their help.
import { existsSync } from 'node:fs';
import { outputFormat } from '../doctor/output-setting.ts';
import { StartError } from '../errors.ts';
import {
  common,
  givenSettings,
  helpText,
  type Invocation,
  parseSettings,
  readSettings,
  type Setting,
  type Settings,
  settingsText,
} from '../read-settings.ts';
import type { Verb } from '../run-service-program.ts';
import { lastLines, needSystemd, type State, stateOf } from './control.ts';
import { dataOf, type Installation, install, type Report, type Service, settingsOf } from './install.ts';

interface Command {
  purpose: string;
  settings: Record<string, Setting>;
  /** Runs the verb and prints the result; resolves to the exit code. */
  run(from: Invocation): Promise<number>;
}

export async function perform(
  { name }: Service,
  verb: Verb,
  commands: Record<Verb, Command>,
  from: Invocation,
): Promise<number> {
  const { purpose, settings, run } = commands[verb];
  if (!from.argv.includes('--help')) return await run(from);
  process.stdout.write(helpText(`${name} ${verb}`, purpose, settings));
  return 0;
}

/**
 * The part of an installation that differs between agent and broker. installCommand() adds the command line and the
 * settings.
 */
export interface Plan extends Omit<Installation, 'command' | 'settings'> {
  /** Settings to store in the settings file. The data directory is added to them. */
  stored: Record<string, unknown>;
}

/** Installs a service, or changes an installed one. Settings that are not given keep their values. */
export async function installCommand<T extends Record<string, Setting> & { data_dir: Setting }>(
  service: Service,
  table: T,
  from: Invocation,
  command: readonly string[],
  plan: (settings: Settings<T>, given: Record<string, unknown>) => Promise<Plan>,
): Promise<Report & { settings: Settings<T> }> {
  const file = settingsOf(service);
  const old = existsSync(file) ? givenSettings(table, { argv: ['--config', file], env: {} }) : {};
  const { config: _, ...given } = { ...old, ...givenSettings(table, from) };
  const settings = parseSettings(table, { data_dir: dataOf(service), ...given });
  if (settings.data_dir !== dataOf(service)) {
    throw new StartError(
      `--data-dir: leave out this flag; the service ${service.name} always stores its data in ${dataOf(service)}`,
    );
  }
  const { stored, ...planned } = await plan(settings, given);
  const found = await install(service, {
    ...planned,
    command: [...command, '--config', file],
    settings: settingsText(table, { ...stored, data_dir: dataOf(service) }),
  });
  say(
    `${service.name} is installed and runs as ${found.user}: ${found.status}.`,
    `Settings of the service: ${file}. To see its log: journalctl -u ${service.name}. To see its state: ${service.name} status`,
  );
  return { ...found, settings };
}

const statusSettings = {
  ...outputFormat,
  help: common.help,
};

/**
 * Returns the verb `status` of a service. `more` returns further fields of the JSON output. `otherWay` says what to do
 * instead on a machine without systemd.
 */
export function statusCommand(
  service: Service,
  more: (state: State) => object = () => ({}),
  otherWay?: string,
): Command {
  const { name } = service;
  return {
    purpose: 'prints the state of the service; exits with 0 if it runs, else with 3',
    settings: statusSettings,
    async run(from) {
      const { output } = readSettings(statusSettings, from);
      needSystemd('status', false, otherWay);
      const state = await stateOf(name);
      const log = await lastLines(name, 5);
      say(output === 'json' ? jsonOf(state, more(state), log) : textOf(name, state, log));
      return state.active === 'active' ? 0 : 3;
    },
  };
}

function jsonOf({ active, exitStatus, ...state }: State, more: object, log: string[]): string {
  const facts = { active: active === 'active', state: active, exit_status: exitStatus };
  return JSON.stringify({ ...facts, ...state, version: state.version ?? null, ...more, log });
}

function textOf(name: string, state: State, log: string[]): string {
  const { installed, active, enabled, since, status, version, result, exitStatus, user } = state;
  if (!installed) return `${name} is not installed as a service; see ${name} install --help`;
  const failed = active === 'failed' ? `, ${result}: its exit code or signal was ${exitStatus}` : '';
  return [
    `${version ? `${name} ${version}` : name}: ${active}${failed}${since && `, since ${since}`}, as ${user}${enabled ? '' : ', not started at boot'}`,
    ...(status && ['active', 'failed'].includes(active) ? [status] : []),
    ...(log.length > 0 ? ['', ...log] : []),
  ].join('\n');
}

export function say(...lines: string[]): void {
  process.stdout.write(lines.map((line) => `${line}\n`).join(''));
}

#!/usr/bin/env node
import { createLogger, isJournal, withPriority } from '../shared/logger.ts';
import {
  failure,
  hideArgument,
  letReadersGo,
  nameProcess,
  nodeIsGood,
  wrongNode,
} from '../shared/program-start-and-end.ts';
import { helpText, type Invocation, readSettings } from '../shared/read-settings.ts';
// The program farhand-agent: reads flags, handles signals and starts the agent (start.ts).
import { collectAtRest } from '../shared/start-garbage-collection.ts';
import { linkText } from '../shared/systemd/link-status-text.ts';
import { createNotify, type Notify } from '../shared/systemd/notify.ts';
import { isVerb, ownCommand, type Verb, verbsHelp } from '../shared/systemd/verb-names-and-help.ts';
import { version } from '../shared/version.ts';
import { agentSettings } from './settings-schema.ts';
import { type Agent, startAgent } from './start.ts';

const program = 'farhand-agent';
/** Settings of the service, which root's upgrade unit reads. */
const settingsFile = '/etc/farhand/agent.toml';
let notify: Notify | undefined;

async function main(): Promise<void> {
  if (!nodeIsGood(process.version)) throw new Error(wrongNode);
  hideArgument('--join-token');
  nameProcess(program);
  const invocation = { argv: process.argv.slice(2), env: process.env };
  if (isVerb(invocation.argv[0])) return await serve(invocation.argv[0], invocation);
  const own = verbs[invocation.argv[0] ?? ''];
  if (own) return await own(invocation);
  if (invocation.argv.includes('--help')) {
    const help = helpText(program, 'connects this machine to a broker', agentSettings);
    const more = `To find problems: ${program} doctor.\nTo accept signed upgrades: ${program} trust-key FILE.\n`;
    return void process.stdout.write(`${help}${verbsHelp(program)}${more}`);
  }
  if (invocation.argv.includes('--version')) return void process.stdout.write(`${version}\n`);
  const settings = readSettings(agentSettings, invocation);
  const log = createLogger(program, settings.log_level, isJournal(process.env));
  collectAtRest();
  notify = createNotify(process.env, process.pid, log);
  let agent: Agent | undefined;
  const stop = (): void => {
    // Before the agent has started there is nothing to close: it is still trying to join a broker.
    if (!agent) process.exit(0);
    void notify?.ending('stopping');
    agent.close().catch(fail);
  };
  process.once('SIGTERM', stop);
  process.once('SIGINT', stop);
  agent = await startAgent(settings, log, (linked) => {
    const text = linkText(settings.broker, linked ? agent?.machineId : undefined);
    notify?.up(text, () => agent?.alive() ?? true);
  });
  agent.ended.then(() => process.exit(0), fail);
}

/**
 * Runs the verb install, status or uninstall. Its module is loaded only here, because a running agent does
 * not need it.
 */
async function serve(verb: Verb, { argv, env }: Invocation): Promise<void> {
  const { service } = await import('./systemd-service.ts');
  process.exitCode = await service(verb, { argv: argv.slice(1), env }, ownCommand(env));
}

/** Verbs besides those of services. Their modules are loaded only here. */
const verbs: Record<string, (invocation: Invocation) => Promise<void>> = {
  doctor: examine,
  async 'trust-key'({ argv }) {
    const { trustKey } = await import('./upgrade/trusted-key.ts');
    process.stdout.write(await trustKey(argv.slice(1)));
  },
  async 'apply-upgrade'({ env }) {
    const { applyUpgrade } = await import('./upgrade/root-unit/apply.ts');
    const settings = readSettings(agentSettings, { argv: ['--config', settingsFile], env: {} });
    await applyUpgrade(settings, createLogger(program, settings.log_level, isJournal(env)));
  },
};

async function examine({ argv, env }: Invocation): Promise<void> {
  const { doctor } = await import('./doctor.ts');
  const { text, code } = await doctor({ argv: argv.slice(1), env });
  process.stdout.write(text);
  process.exitCode = code;
}

function fail(error: unknown): void {
  const { text, code } = failure(program, error);
  process.stderr.write(isJournal(process.env) ? withPriority(text, 3) : `${text}\n`);
  // systemd does not restart the agent after exit code 78, so the reason is first set as the status text of
  // the unit.
  const reported = code === 78 && notify ? notify.ending(text) : undefined;
  if (!reported) process.exit(code);
  void reported.then(() => process.exit(code));
}

process.on('unhandledRejection', fail);
letReadersGo();
main().catch(fail);

#!/usr/bin/env node
import { createLogger, isJournal, withPriority } from '../shared/logger.ts';
import {
  failure,
  letReadersGo,
  nameProcess,
  nodeIsGood,
  wrongNode,
} from '../shared/program-start-and-end.ts';
import { helpText, type Invocation, readSettings } from '../shared/read-settings.ts';
// The program farhand-broker: reads flags, handles signals and starts the broker (start/).
import { collectAtRest } from '../shared/start-garbage-collection.ts';
import { createNotify, type Notify } from '../shared/systemd/notify.ts';
import { isVerb, ownCommand, type Verb, verbsHelp } from '../shared/systemd/verb-names-and-help.ts';
import { version } from '../shared/version.ts';
import { brokerSettings, refusePasswordIn } from './settings-schema.ts';
import { startBroker } from './start/index.ts';

const program = 'farhand-broker';
let notify: Notify | undefined;

async function main(): Promise<void> {
  if (!nodeIsGood(process.version)) throw new Error(wrongNode);
  nameProcess(program);
  const invocation = { argv: process.argv.slice(2), env: process.env };
  refusePasswordIn(invocation.argv);
  const [verb] = invocation.argv;
  if (isVerb(verb)) return await serve(verb, invocation);
  if (verb === 'migrate' || verb === 'doctor') return await maintain(verb, invocation);
  if (invocation.argv.includes('--help')) {
    const help = helpText(program, 'the server that agents and API clients connect to', brokerSettings);
    return void process.stdout.write(
      `${help}${verbsHelp(program)}To find problems: ${program} doctor. To move its data to PostgreSQL, or back to files: ${program} migrate --help.\n`,
    );
  }
  if (invocation.argv.includes('--version')) return void process.stdout.write(`${version}\n`);
  const settings = readSettings(brokerSettings, invocation);
  const log = createLogger(program, settings.log_level, isJournal(process.env));
  collectAtRest();
  notify = createNotify(process.env, process.pid, log);
  const starting = startBroker(settings, log);
  // A signal may arrive while the broker is still starting.
  const stop = (): void => {
    void notify?.ending('stopping');
    starting.then((broker) => broker.close()).then(() => process.exit(0), fail);
  };
  process.once('SIGTERM', stop);
  process.once('SIGINT', stop);
  const broker = await starting;
  if (settings.local) process.stdout.write(`${broker.socket}\n`);
  notify.up(`REST on ${broker.url ?? broker.socket}, agents on ${broker.grpc ?? 'nothing'}`, broker.alive);
}

/**
 * Runs the verb install, status or uninstall. Their module is loaded only here, because a running broker does
 * not need it.
 */
async function serve(verb: Verb, { argv, env }: Invocation): Promise<void> {
  const { service } = await import('./systemd-service.ts');
  process.exitCode = await service(verb, { argv: argv.slice(1), env }, ownCommand(env));
}

/**
 * Runs the verb doctor or migrate. Their modules are loaded only here, because a running broker does not need them.
 */
async function maintain(verb: 'doctor' | 'migrate', { argv, env }: Invocation): Promise<void> {
  const invocation = { argv: argv.slice(1), env };
  if (verb === 'migrate') {
    const { migrate } = await import('./migrate/index.ts');
    return await migrate(invocation, (line) => void process.stdout.write(`${line}\n`));
  }
  const { doctor } = await import('./doctor.ts');
  const { text, code } = await doctor(invocation);
  process.stdout.write(text);
  process.exitCode = code;
}

function fail(error: unknown): void {
  const { text, code } = failure(program, error);
  process.stderr.write(isJournal(process.env) ? withPriority(text, 3) : `${text}\n`);
  // After exit code 78 systemd does not restart the broker, so the reason is first set as the status text of
  // the unit.
  const notified = code === 78 && notify ? notify.ending(text) : undefined;
  if (!notified) process.exit(code);
  void notified.then(() => process.exit(code));
}

process.on('unhandledRejection', fail);
letReadersGo();
main().catch(fail);

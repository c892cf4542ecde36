#!/usr/bin/env node
// farhand-broker: reads flags and signals; start/ does the rest.
import { createLogger } from '../shared/logger.ts';
import { failure, nodeIsGood, wrongNode } from '../shared/program.ts';
import { helpText, readSettings } from '../shared/settings.ts';
import { version } from '../shared/version.ts';
import { brokerSettings } from './config.ts';
import { startBroker } from './start/index.ts';

const program = 'farhand-broker';

async function main(): Promise<void> {
  if (!nodeIsGood(process.version)) throw new Error(wrongNode);
  const invocation = { argv: process.argv.slice(2), env: process.env };
  if (invocation.argv.includes('--help')) {
    return void process.stdout.write(
      helpText(program, 'the box that agents dial and people call', brokerSettings),
    );
  }
  if (invocation.argv.includes('--version')) return void process.stdout.write(`${version}\n`);
  const settings = readSettings(brokerSettings, invocation);
  const starting = startBroker(settings, createLogger(program, settings.log_level));
  // A signal may come while it still starts.
  const stop = (): void => {
    starting.then((broker) => broker.close()).then(() => process.exit(0), fail);
  };
  process.once('SIGTERM', stop);
  process.once('SIGINT', stop);
  const broker = await starting;
  if (settings.local) process.stdout.write(`${broker.socket}\n`);
}

function fail(error: unknown): void {
  const { text, code } = failure(program, error);
  process.stderr.write(`${text}\n`);
  process.exit(code);
}

process.on('unhandledRejection', fail);
main().catch(fail);

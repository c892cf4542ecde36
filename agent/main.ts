#!/usr/bin/env node
// farhand-agent: reads flags and signals; start.ts does the rest.
import { createLogger } from '../shared/logger.ts';
import { failure, nodeIsGood, wrongNode } from '../shared/program.ts';
import { helpText, readSettings } from '../shared/settings.ts';
import { version } from '../shared/version.ts';
import { agentSettings } from './config.ts';
import { startAgent } from './start.ts';

const program = 'farhand-agent';

async function main(): Promise<void> {
  if (!nodeIsGood(process.version)) throw new Error(wrongNode);
  const invocation = { argv: process.argv.slice(2), env: process.env };
  if (invocation.argv.includes('--help')) {
    return void process.stdout.write(helpText(program, 'lets a broker reach this machine', agentSettings));
  }
  if (invocation.argv.includes('--version')) return void process.stdout.write(`${version}\n`);
  const settings = readSettings(agentSettings, invocation);
  // A signal may come while the agent still tries to join.
  process.once('SIGTERM', leave);
  process.once('SIGINT', leave);
  const agent = await startAgent(settings, createLogger(program, settings.log_level));
  process.off('SIGTERM', leave).once('SIGTERM', stop);
  process.off('SIGINT', leave).once('SIGINT', stop);
  agent.ended.then(() => process.exit(0), fail);
  function stop(): void {
    agent.close().catch(fail);
  }
}

function leave(): void {
  process.exit(0);
}

function fail(error: unknown): void {
  const { text, code } = failure(program, error);
  process.stderr.write(`${text}\n`);
  process.exit(code);
}

process.on('unhandledRejection', fail);
main().catch(fail);

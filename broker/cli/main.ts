#!/usr/bin/env node
// farhand: the command line, a client of the public API and nothing more.
import { Command, CommanderError } from 'commander';
import { failure, nodeIsGood, wrongNode } from '../../shared/program.ts';
import { FarhandError } from '../../shared/sdk/index.ts';
import { version } from '../../shared/version.ts';
import { addAuth } from './auth.ts';
import { addBroker } from './broker.ts';
import type { Where } from './connect.ts';
import { addJoinTokens } from './join-tokens.ts';
import { addSessions } from './sessions.ts';
import { addShell } from './shell.ts';

const program = new Command('farhand')
  .description('Remote machines from the command line.')
  .version(version)
  .showHelpAfterError('See farhand --help.')
  .exitOverride();
addAuth(program, where);
addJoinTokens(program, where);
addShell(program, where);
addSessions(program, where);
addBroker(program, where);

function where(options: { dataDir?: string }): Where {
  const { FARHAND_DATA_DIR, FARHAND_URL: url, FARHAND_API_KEY: apiKey } = process.env;
  return { dataDir: options.dataDir ?? (url ? undefined : FARHAND_DATA_DIR), url, apiKey };
}

async function main(): Promise<void> {
  if (!nodeIsGood(process.version)) throw new Error(wrongNode);
  await program.parseAsync();
}

main().catch((error: unknown) => {
  // Commander has printed its own complaint; help and version are no failure.
  if (error instanceof CommanderError) {
    process.exitCode = error.exitCode === 0 ? 0 : 2;
    return;
  }
  const { text, code } =
    error instanceof FarhandError
      ? { text: `farhand: ${error.message} (${error.code}, request ${error.requestId})`, code: 1 }
      : failure('farhand', error);
  process.stderr.write(`${text}\n`);
  process.exitCode = code;
});

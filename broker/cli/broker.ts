// The verbs of farhand broker: a list of brokers, and backup and repair of a broker on this machine.
import { execFile } from 'node:child_process';
import { existsSync, statSync } from 'node:fs';
import { mkdir, mkdtemp, open, readdir, rename, rm } from 'node:fs/promises';
import { dirname, join, resolve, sep } from 'node:path';
import { promisify } from 'node:util';
import type { Command } from 'commander';
import { errnoOf, StartError, UsageError } from '../../shared/errors.ts';
import { startOnce, withSocket } from './call-or-start-local-broker.ts';
import { where } from './connect-to-broker.ts';
import { type Common, localVerb } from './declare-verb.ts';
import { print } from './print.ts';
import { routeVerb } from './verb-from-route.ts';

export function addBroker(program: Command): void {
  const broker = program
    .command('broker')
    .description('list brokers, and back up or repair a broker on this machine');
  routeVerb(broker, 'list', 'brokers', 'list', {
    about: 'list the brokers that share a database; the list is empty for a broker without --peer-listen',
    view: { fields: 'url status machines linked lease_until id' },
  });
  const backupSpec = {
    about: 'copy the state, history and keys of a running or stopped broker to a new directory',
    examples: ['farhand broker backup --data-dir /var/lib/farhand-broker --to /srv/backup/today'],
    flags: { '--to <dir>': 'new directory for the backup; a broker can be started with it as --data-dir' },
    required: ['to'],
  } as const;
  localVerb(broker, 'backup', backupSpec, async ({ to = '', ...options }) => {
    const made = await backup(directoryOf(options), resolve(to));
    await print(options.output, made, () => [`${made.directory} (${made.bytes} bytes)`]);
  });
  const acceptSpec = {
    about: 'accept changes that were made to state.json by hand while no broker ran',
    examples: ['farhand broker state accept --data-dir /var/lib/farhand-broker'],
  };
  const state = broker
    .command('state')
    .description('repair state.json, the file with all configured objects');
  localVerb(state, 'accept', acceptSpec, async (options) => {
    const file = join(directoryOf(options), 'state.json');
    await startOnce(dirname(file), '--accept-state');
    await print(options.output, { file, accepted: true }, () => [
      `${file} is accepted; the broker can be started again`,
    ]);
  });
}

function directoryOf(options: Common): string {
  const { dataDir } = where(options);
  if (!dataDir) throw new UsageError('set the data directory of the broker: --data-dir DIR');
  return resolve(dataDir);
}

async function backup(dataDir: string, to: string): Promise<{ directory: string; bytes: number }> {
  if (`${to}${sep}`.startsWith(`${dataDir}${sep}`))
    throw new UsageError(
      '--to must be outside the data directory, or the backup would be lost together with it',
    );
  if (existsSync(to)) throw new StartError(`${to} already exists; choose a new directory for the backup`, 1);
  await mkdir(dirname(to), { recursive: true, mode: 0o700 });
  await withSocket(dataDir, async (_client, post) => {
    const { directory } = await post<{ directory: string }>('/local/backup');
    await moveWhole(directory, to);
  });
  const names = await readdir(to);
  return { directory: to, bytes: names.reduce((sum, name) => sum + statSync(join(to, name)).size, 0) };
}

const run = promisify(execFile);

/** Moves a directory, even to another file system. After a crash, `to` is complete or does not exist. */
async function moveWhole(from: string, to: string): Promise<void> {
  let partial: string | undefined;
  try {
    await rename(from, to).catch(async (error: unknown) => {
      if (errnoOf(error) !== 'EXDEV') throw error;
      partial = await mkdtemp(`${to}.partial-`);
      // If root runs this program, cp -a preserves the broker's user as owner, so that the broker can read the backup.
      await run('cp', ['-a', `${from}/.`, partial]);
      await run('sync', ['-f', partial]);
      await rename(partial, to);
    });
    await using parent = await open(dirname(to), 'r');
    await parent.sync();
  } finally {
    for (const left of [from, partial]) if (left) await rm(left, { recursive: true, force: true });
  }
}

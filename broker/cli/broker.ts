// farhand broker: what concerns the broker's own box.
import { existsSync, statSync } from 'node:fs';
import { chown, copyFile, mkdir, mkdtemp, open, readdir, rename, rm } from 'node:fs/promises';
import { dirname, join, resolve, sep } from 'node:path';
import type { Command } from 'commander';
import { errnoOf, StartError, UsageError } from '../../shared/errors.ts';
import { startOnce, withSocket } from './local.ts';
import { print } from './output.ts';
import { type Common, verb } from './verb.ts';
import { where } from './where.ts';

interface BackupOptions extends Common {
  to: string;
}

export function addBroker(program: Command): void {
  const broker = program.command('broker').description('the broker on this box');
  verb(
    broker,
    'backup',
    'copy a broker’s state, history and keys, while it runs or not, into a new directory',
    'farhand broker backup --data-dir /var/lib/farhand-broker --to /srv/backup/today',
  )
    .requiredOption('--to <dir>', 'where the copy goes; a broker starts on it as it is')
    .action(async (options: BackupOptions) => {
      const made = await backup(directoryOf(options), resolve(options.to));
      print(options.output, made, () => [`${made.directory} (${made.bytes} bytes)`]);
    });
  verb(
    broker.command('state').description('state.json, which holds what was declared'),
    'accept',
    'accept a state.json that was edited by hand, while no broker runs',
    'farhand broker state accept --data-dir /var/lib/farhand-broker',
  ).action(async (options: Common) => {
    const file = join(directoryOf(options), 'state.json');
    await startOnce(dirname(file), '--accept-state');
    print(options.output, { file, accepted: true }, () => [`${file} is accepted: a broker starts with it`]);
  });
}

function directoryOf(options: Common): string {
  const { dataDir } = where(options);
  if (!dataDir) throw new UsageError('say which broker: --data-dir DIR, on its own box');
  return resolve(dataDir);
}

async function backup(dataDir: string, to: string): Promise<{ directory: string; bytes: number }> {
  if (`${to}${sep}`.startsWith(`${dataDir}${sep}`)) {
    throw new UsageError('--to must lie outside of the data directory, or it would be lost with it');
  }
  if (existsSync(to)) throw new StartError(`${to} exists already: a backup goes into a new directory`, 1);
  await mkdir(dirname(to), { recursive: true, mode: 0o700 });
  await withSocket(dataDir, async (_client, post) => {
    const { directory } = await post('/local/backup');
    await take(directory, to);
  });
  const names = await readdir(to);
  return { directory: to, bytes: names.reduce((sum, name) => sum + statSync(join(to, name)).size, 0) };
}

/** Under its own name it is whole or not there at all. */
async function take(from: string, to: string): Promise<void> {
  let beside: string | undefined;
  try {
    await rename(from, to).catch(async (error: unknown) => {
      if (errnoOf(error) !== 'EXDEV') throw error;
      beside = await mkdtemp(`${to}.partial-`);
      await copyAll(from, beside);
      await rename(beside, to);
    });
    await sync(dirname(to));
  } finally {
    for (const left of [from, beside]) if (left) await rm(left, { recursive: true, force: true });
  }
}

/** To another file system; what root copies belongs to the broker's user. */
async function copyAll(from: string, to: string): Promise<void> {
  const names = await readdir(from);
  // A broker starts on nothing that lacks it.
  for (const name of names.toSorted((a) => (a === 'state.json' ? 1 : -1))) {
    await copyFile(join(from, name), join(to, name));
    await sync(join(to, name));
  }
  if (process.getuid?.() === 0) {
    const { uid, gid } = statSync(from);
    for (const path of [...names.map((name) => join(to, name)), to]) await chown(path, uid, gid);
  }
  await sync(to);
}

async function sync(path: string): Promise<void> {
  const handle = await open(path, 'r');
  try {
    await handle.sync();
  } finally {
    await handle.close();
  }
}

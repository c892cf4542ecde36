// Makes a consistent backup of the data directory while the broker runs: all files are of the same moment.
import { existsSync } from 'node:fs';
import { mkdtemp, readdir, readFile, rm } from 'node:fs/promises';
import { basename, join } from 'node:path';
import { writeDurably } from '../shared/durable-file.ts';
import { AppError } from '../shared/errors.ts';
import type { History } from './history/history-database.ts';
import type { State } from './state/index.ts';

/** The name of a copy starts with this. mkdtemp() adds six characters. */
const prefix = '.backup-';
const copyName = /^\.backup-\w{6}$/;

export type Backups = Awaited<ReturnType<typeof createBackups>>;

/** Returns make(), which makes a backup. `keyFiles` are further files to copy; they never change once created. */
export async function createBackups(
  dataDir: string,
  { state, history }: { state: State; history: History },
  keyFiles: readonly string[],
) {
  let making = false;
  let last = '';

  /** Removes the copies that a broker or `farhand broker backup` has left when it was killed. */
  async function removeOld(): Promise<void> {
    for (const name of await readdir(dataDir))
      if (copyName.test(name) && name !== last)
        await rm(join(dataDir, name), { recursive: true, force: true });
  }
  await removeOld();

  async function copy(directory: string): Promise<void> {
    // State and history are copied between two commits of the state, so that both copies fit together. An entry that
    // the copied history lacks is still in the outbox of the copied state.json.
    const [declared, copyHistory] = await state.between(
      (committed) => [committed, history.snapshot()] as const,
    );
    await copyHistory(join(directory, 'history.db'));
    for (const name of keyFiles) {
      const file = join(dataDir, name);
      if (existsSync(file)) await writeDurably(join(directory, name), await readFile(file, 'utf8'));
    }
    // Written last: no broker starts on a directory without this file, so an incomplete backup is never used.
    await writeDurably(join(directory, 'state.json'), declared);
  }

  return {
    /**
     * Makes a copy inside the data directory; the caller then moves it away. Throws conflict while another
     * copy is being made.
     */
    async make() {
      if (making) throw new AppError('conflict', 'another backup is being made; try again later');
      making = true;
      let directory = '';
      try {
        // The last copy stays, because another client may still be moving it away.
        await removeOld();
        directory = await mkdtemp(join(dataDir, prefix));
        await copy(directory);
        last = basename(directory);
      } catch (error) {
        if (directory) await rm(directory, { recursive: true, force: true });
        throw error;
      } finally {
        making = false;
      }
      return { directory };
    },
  };
}

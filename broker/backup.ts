// Makes a consistent backup of the data directory while the broker runs: all files are of the same moment.
import { existsSync } from 'node:fs';
import { mkdtemp, readdir, readFile, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { writeDurably } from '../shared/durable-file.ts';
import { AppError } from '../shared/errors.ts';
import type { History } from './history/history-database.ts';
import type { State } from './state/index.ts';

export type Backups = Awaited<ReturnType<typeof createBackups>>;

/** Returns make(), which makes a backup. `keyFiles` are further files to copy; they never change once created. */
export async function createBackups(
  dataDir: string,
  { state, history }: { state: State; history: History },
  keyFiles: readonly string[],
) {
  // A broker or `farhand broker backup` that was killed may have left copies here.
  for (const name of await readdir(dataDir))
    if (/^backup(-|$)/.test(name)) await rm(join(dataDir, name), { recursive: true, force: true });
  let making = false;

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
      // Each copy has a directory of its own: another client may still be moving an earlier copy away.
      let directory = '';
      try {
        directory = await mkdtemp(join(dataDir, 'backup-'));
        await copy(directory);
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

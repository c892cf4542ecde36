// Files that root keeps for a service: replaced whole, and put back as they were.
import { chmod, mkdir, open, rm, rmdir } from 'node:fs/promises';
import { dirname } from 'node:path';
import { writeDurably } from '../durable-file.ts';
import { errnoOf } from '../errors.ts';

export interface Content {
  text: string;
  mode: number;
  uid: number;
  gid: number;
}

/** As it is now; undefined where there is none. */
export async function contentOf(file: string): Promise<Content | undefined> {
  try {
    await using handle = await open(file, 'r');
    const { mode, uid, gid } = await handle.stat();
    return { text: await handle.readFile('utf8'), mode: mode & 0o7777, uid, gid };
  } catch (error) {
    if (errnoOf(error) === 'ENOENT') return undefined;
    throw error;
  }
}

/** Makes it so; without a content it goes, and its directory if that is empty then. */
export async function place(file: string, content: Content | undefined): Promise<void> {
  if (content) return await write(file, content);
  await rm(file, { force: true });
  await rmdir(dirname(file)).catch(() => {});
}

async function write(file: string, { text, mode, uid, gid }: Content): Promise<void> {
  const directory = dirname(file);
  const made = await mkdir(directory, { recursive: true });
  // Whatever the umask of who installs: the service has to get in.
  if (made) await chmod(directory, 0o755);
  await writeDurably(file, text, { mode, owner: { uid, gid } });
}

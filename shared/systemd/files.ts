// Files that root keeps for a service: replaced whole, and put back as they were.
import { randomBytes } from 'node:crypto';
import { mkdir, open, rename, rm, rmdir } from 'node:fs/promises';
import { dirname } from 'node:path';
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
  await mkdir(dirname(file), { recursive: true, mode: 0o755 });
  const temporary = `${file}.${randomBytes(8).toString('hex')}`;
  try {
    // By handle: the directory may be somebody else's, who could put a link in the place of the name.
    await using handle = await open(temporary, 'wx', 0o600);
    await handle.writeFile(text);
    await handle.chown(uid, gid);
    await handle.chmod(mode);
    await handle.sync();
    await rename(temporary, file);
  } catch (error) {
    await rm(temporary, { force: true });
    throw error;
  }
}

// Files that root writes for a service: replaced whole, and put back as they were.
import { chmod, mkdir, rm, rmdir } from 'node:fs/promises';
import { dirname } from 'node:path';
import { writeDurably } from '../durable-file.ts';
import type { FileContent } from '../regular-file.ts';

/** Writes the file; without a content removes it, and its directory if that is empty then. */
export async function place(file: string, content: FileContent | undefined): Promise<void> {
  const directory = dirname(file);
  if (!content) {
    await rm(file, { force: true });
    return await rmdir(directory).catch(() => {});
  }
  const { text, mode, uid, gid } = content;
  const made = await mkdir(directory, { recursive: true });
  // The service must get in, whatever the umask of the administrator.
  if (made) await chmod(directory, 0o755);
  await writeDurably(file, text, { mode, owner: { uid, gid } });
}

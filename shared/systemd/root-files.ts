// Writes and removes files that root owns or creates for a service, such as its unit and settings.
import { chmod, mkdir, rm, rmdir } from 'node:fs/promises';
import { dirname } from 'node:path';
import { writeDurably } from '../durable-file.ts';
import type { FileContent } from '../regular-file.ts';

/** Replaces a file; without `content` removes the file, and its directory if that is then empty. */
export async function place(file: string, content: FileContent | undefined): Promise<void> {
  const directory = dirname(file);
  if (!content) {
    await rm(file, { force: true });
    return await rmdir(directory).catch(() => {});
  }
  const { text, mode, uid, gid } = content;
  const made = await mkdir(directory, { recursive: true });
  // The service must be able to enter a new directory, whatever the administrator's umask is.
  if (made) await chmod(directory, 0o755);
  await writeDurably(file, text, { mode, owner: { uid, gid } });
}

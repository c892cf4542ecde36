// A tar from a machine into a new local directory. The machine may be hostile: nothing lands outside, nothing goes
// through a link, no file gets more than plain permissions; and it is there as a whole or not at all.
import { chmod, lstat, mkdir, mkdtemp, open, rename, rm, symlink } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { AppError, StartError } from '../../../shared/errors.ts';
import {
  assertInside,
  type Bytes,
  bytes,
  fromText,
  pathOfEntry,
  readTar,
  shown,
  type TarEntry,
} from '../../../shared/tar/index.ts';
import { clean, hint } from '../output.ts';

/** What waits until every file is there. */
interface Later {
  links: { path: Bytes; target: Bytes }[];
  modes: { path: Bytes; mode: number }[];
}

export async function unpackNew(chunks: AsyncIterable<Buffer>, directory: string): Promise<void> {
  if (await lstat(directory).catch(() => undefined)) {
    throw new StartError(`${directory} exists: a directory is fetched under a new name only`, 1);
  }
  const draft = await mkdtemp(join(dirname(directory), '.farhand-'));
  try {
    await fill(fromText(draft), chunks);
    await rename(draft, directory);
  } catch (error) {
    await rm(draft, { recursive: true, force: true });
    throw error;
  }
}

async function fill(root: Bytes, chunks: AsyncIterable<Buffer>): Promise<void> {
  const later: Later = { links: [], modes: [{ path: root, mode: 0o755 }] };
  for await (const entry of readTar(chunks)) await land(root, entry, later);
  // First all of their directories, so that none of them can be a link.
  for (const { path } of later.links) await makeRoom(root, path);
  for (const { path, target } of later.links) await symlink(bytes(target), bytes(`${root}/${path}`));
  const mask = process.umask();
  for (const { path, mode } of later.modes.reverse()) await chmod(bytes(path), mode & 0o777 & ~mask);
}

async function land(root: Bytes, entry: TarEntry, later: Later): Promise<void> {
  const path = pathOfEntry(entry.name);
  const at = path === '' ? root : `${root}/${path}`;
  if (entry.kind === 'directory') {
    await mkdir(bytes(at), { recursive: true, mode: 0o700 });
    later.modes.push({ path: at, mode: entry.mode });
  } else if (entry.kind === 'symlink') keepLink(path, entry.target ?? '', later);
  else if (entry.kind === 'link') hint(`farhand: ${clean(shown(path))} is a hard link: left out`);
  else {
    await makeRoom(root, path);
    await write(at, entry);
  }
}

function keepLink(path: Bytes, target: Bytes, later: Later): void {
  try {
    assertInside(path, target);
    later.links.push({ path, target });
  } catch (error) {
    if (!(error instanceof AppError)) throw error;
    hint(`farhand: ${clean(error.message)}: left out`);
  }
}

/** So far there are only directories and files of ours below the root. */
async function makeRoom(root: Bytes, path: Bytes): Promise<void> {
  const cut = path.lastIndexOf('/');
  if (cut > 0) await mkdir(bytes(`${root}/${path.slice(0, cut)}`), { recursive: true, mode: 0o700 });
}

async function write(at: Bytes, { body, mode }: TarEntry): Promise<void> {
  const handle = await open(bytes(at), 'wx', mode & 0o777);
  try {
    for await (const chunk of body) await handle.writeFile(chunk);
  } finally {
    await handle.close();
  }
}

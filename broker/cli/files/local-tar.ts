// Packs local directories as tar archives while they are sent. Extracts archives that may come from hostile
// machines.
import { chmod, lstat, mkdir, mkdtemp, open, readdir, readlink, rename, rm, symlink } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { AppError, StartError } from '../../../shared/errors.ts';
import * as tar from '../../../shared/tar/index.ts';
import { clean, hint } from '../print.ts';

const chunkBytes = 256 * 1024;

/** Yields a tar of a directory and the files, directories and symlinks in it. If `mode` is set, each file gets it. */
export async function* pack(directory: string, mode?: number): AsyncGenerator<Uint8Array> {
  yield* packBelow(tar.fromText(directory), './', mode);
  yield tar.endOfArchive;
}

async function* packBelow(at: tar.Bytes, name: tar.Bytes, mode?: number): AsyncGenerator<Uint8Array> {
  const stats = await lstat(tar.bytes(at), { bigint: true });
  const owner = { uid: 0, gid: 0, owner: '', group: '' };
  const header = { name, mode: Number(stats.mode) & 0o777, ...owner, size: 0, mtimeNs: stats.mtimeNs };
  if (stats.isDirectory()) {
    yield tar.encodeHeader({ ...header, kind: 'directory' });
    const names = await readdir(tar.bytes(at), { encoding: 'buffer' });
    for (const child of names.map((one) => one.toString('latin1')).sort()) {
      yield* packBelow(`${at}/${child}`, name === './' ? child : `${name.replace(/\/$/, '')}/${child}`, mode);
    }
  } else if (stats.isSymbolicLink()) {
    const target = (await readlink(tar.bytes(at), { encoding: 'buffer' })).toString('latin1');
    if (staysInside(name, target)) yield tar.encodeHeader({ ...header, kind: 'symlink', target });
  } else if (stats.isFile()) yield* packFile(at, { ...header, mode: mode ?? header.mode });
  else hint(`farhand: skipped ${clean(tar.toText(at))}: it is neither a file nor a directory nor a symlink`);
}

/** True if a symlink points to a path inside the archive. Machines refuse an archive with any other symlink. */
function staysInside(name: tar.Bytes, target: tar.Bytes): boolean {
  try {
    tar.assertInside(name, target);
    return true;
  } catch (error) {
    if (!(error instanceof AppError)) throw error;
    hint(`farhand: skipped a symlink: ${clean(error.message)}`);
    return false;
  }
}

async function* packFile(at: tar.Bytes, header: Omit<tar.TarHeader, 'kind'>): AsyncGenerator<Uint8Array> {
  await using handle = await open(tar.bytes(at));
  const { size } = await handle.stat();
  yield tar.encodeHeader({ ...header, kind: 'file', size });
  for (let left = size; left > 0; ) {
    // Each chunk needs a new buffer, because the previous chunk may still wait to be sent.
    const chunk = Buffer.allocUnsafe(Math.min(left, chunkBytes));
    const { bytesRead } = await handle.read(chunk, 0, chunk.length, size - left);
    if (bytesRead === 0)
      throw new StartError(`${clean(tar.toText(at))} changed while it was read; try again`, 1);
    left -= bytesRead;
    yield chunk.subarray(0, bytesRead);
  }
  if (tar.paddingOf(size) > 0) yield Buffer.alloc(tar.paddingOf(size));
}

/** What to do after all files are written: create links, and set modes of directories. */
interface Later {
  links: { path: tar.Bytes; target: tar.Bytes }[];
  /** Modes of the directories in the archive. The root is first: its mode is 0755, unless the archive sets another. */
  modes: Map<tar.Bytes, number>;
}

/**
 * Extracts an archive to a new directory, completely or not at all. No entry is written outside that directory. Links
 * are not followed, and setuid, setgid and sticky bits are not set.
 */
export async function extractNew(chunks: AsyncIterable<Buffer>, directory: string): Promise<void> {
  if (await lstat(directory).catch(() => undefined))
    throw new StartError(`${directory} already exists; choose a new name for the directory`, 1);
  const draft = await mkdtemp(join(dirname(directory), '.farhand-'));
  try {
    await extract(tar.fromText(draft), chunks);
    await rename(draft, directory);
  } catch (error) {
    await rm(draft, { recursive: true, force: true });
    throw error;
  }
}

async function extract(root: tar.Bytes, chunks: AsyncIterable<Buffer>): Promise<void> {
  const later: Later = { links: [], modes: new Map([[root, 0o755]]) };
  for await (const entry of tar.readTar(chunks)) await extractEntry(root, entry, later);
  // The parents of all links are created before any link. Otherwise mkdir() could follow a link of the archive.
  for (const { path } of later.links) await makeParent(root, path);
  for (const { path, target } of later.links) await symlink(tar.bytes(target), tar.bytes(`${root}/${path}`));
  const mask = process.umask();
  for (const [path, mode] of [...later.modes].reverse()) await chmod(tar.bytes(path), mode & 0o777 & ~mask);
}

async function extractEntry(root: tar.Bytes, entry: tar.TarEntry, later: Later): Promise<void> {
  const path = tar.pathOfEntry(entry.name);
  const at = path === '' ? root : `${root}/${path}`;
  if (entry.kind === 'directory') {
    await mkdir(tar.bytes(at), { recursive: true, mode: 0o700 });
    later.modes.set(at, entry.mode);
  } else if (entry.kind === 'symlink') {
    const { target = '' } = entry;
    if (staysInside(path, target)) later.links.push({ path, target });
  } else if (entry.kind === 'link') hint(`farhand: skipped ${clean(tar.toText(path))}: it is a hard link`);
  else {
    await makeParent(root, path);
    await writeChunks(tar.bytes(at), entry.body, 'wx', entry.mode & 0o777);
  }
}

/**
 * Creates the parent directory of a path below `root`. This program makes all links only after all directories, so
 * mkdir() cannot follow a link.
 */
async function makeParent(root: tar.Bytes, path: tar.Bytes): Promise<void> {
  const cut = path.lastIndexOf('/');
  if (cut > 0) await mkdir(tar.bytes(`${root}/${path.slice(0, cut)}`), { recursive: true, mode: 0o700 });
}

/** Writes chunks to a file. `flags`: flags of fs.open(), such as "wx". */
export async function writeChunks(
  file: string | Buffer,
  chunks: AsyncIterable<Uint8Array>,
  flags: string,
  mode = 0o666,
): Promise<void> {
  await using handle = await open(file, flags, mode);
  for await (const chunk of chunks) await handle.writeFile(chunk);
}

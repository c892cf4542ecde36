// Handles uploads of agent packages: checks each package while it arrives, and stores it with its signature.
import { createHash } from 'node:crypto';
import { constants } from 'node:fs';
import { type FileHandle, mkdir, open, readdir, rename, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { type SignedPackage, signatureFileOf } from '../../shared/agent-package-signature.ts';
import type { Api, Caller, Handlers, Input } from '../../shared/api/route-table.ts';
import { syncDirectory, writeDurably } from '../../shared/durable-file.ts';
import { AppError, fieldError, fromErrno } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { Semaphore } from '../../shared/semaphore.ts';
import {
  type AgentPackage,
  type Catalog,
  isSigned,
  parsePackageName,
  parseSignatureFile,
  toJson,
} from './available-packages.ts';

/** Maximum size of a package in bytes. */
const mostBytes = 512 * 1024 * 1024;
/** Maximum size of all uploaded packages together, in bytes. */
const mostBytesInAll = 4 * 1024 ** 3;
const mostUploads = 4;
const temporary = '.upload-';

/** Deletes the files of unfinished uploads, which a killed broker has left. */
export async function removeUnfinishedUploads(directory: string): Promise<void> {
  const names = await readdir(directory).catch((): string[] => []);
  for (const name of names.filter((one) => one.startsWith(temporary)))
    await rm(join(directory, name), { force: true });
}

/**
 * Returns the handlers that add and delete packages in `directory`. `catalog` returns all packages of the broker.
 */
export function uploadHandlers(
  directory: string,
  catalog: () => Catalog,
): Pick<Handlers['packages'], 'upload' | 'remove'> {
  const busy = `${mostUploads} packages are being uploaded already: try again later`;
  const slots = new Semaphore(mostUploads, () => new AppError('unavailable', busy));
  const changes = new Semaphore(1);
  return {
    async upload(input, caller) {
      assertUnlimited(caller);
      return await slots.run(caller.signal, () => upload({ directory, catalog, changes }, input, caller));
    },
    async remove({ package: file }, caller) {
      assertUnlimited(caller);
      const { path } = uploaded(catalog(), file);
      // The signature is removed first, because a package without one is not listed.
      await rm(signatureFileOf(path), { force: true });
      await rm(path, { force: true });
      await syncDirectory(directory);
      return { deleted: true };
    },
  };
}

/**
 * Throws forbidden for a key that is limited to some machines, because an uploaded package may be installed on any
 * machine.
 */
function assertUnlimited({ reachable }: Pick<Caller, 'reachable'>): void {
  if (!reachable()) return;
  const message =
    'a key limited to some machines cannot add or delete packages: use a key without machine_ids and tags';
  throw new AppError('forbidden', message);
}

function uploaded(packages: Catalog, file: string): AgentPackage {
  const found = packages.filter((one) => one.file === file);
  const own = found.find((one) => one.uploaded);
  if (own) return own;
  const details = { file: file.slice(0, 200) };
  if (found.length === 0)
    throw new AppError('package_not_found', `this broker has no package ${file.slice(0, 200)}`, details);
  throw new AppError(
    'conflict',
    `${file} cannot be deleted: it is one of the broker’s own packages, and only uploaded packages can be deleted`,
    details,
  );
}

interface Uploads {
  directory: string;
  catalog: () => Catalog;
  /** Packages are put into the directory one after another. */
  changes: Semaphore;
}

async function upload(
  { directory, catalog, changes }: Uploads,
  { package: file, signature: text, content }: Input<Api['packages']['upload']>,
  caller: Caller,
) {
  const signed = checked(file, text);
  const find = () => catalog().find((one) => one.file === file && one.signature !== undefined);
  assertSame(find(), signed, file);
  assertSpace(catalog(), signed);
  await mkdir(directory, { recursive: true, mode: 0o700 });
  const part = join(directory, `${temporary}${newId('call')}`);
  const path = join(directory, file);
  try {
    await store(part, signed, content.chunks);
    await changes.run(caller.signal, async () => {
      const same = find();
      assertSame(same, signed, file);
      if (same) return;
      assertSpace(catalog(), signed);
      await rename(part, path);
      await syncDirectory(directory);
      await writeDurably(signatureFileOf(path), text);
    });
  } catch (error) {
    throw fromErrno(error, file);
  } finally {
    await rm(part, { force: true });
  }
  caller.headers.set('Location', `/packages/${file}`);
  const stored = find();
  if (stored) return toJson(stored);
  throw new AppError('unavailable', `${file} was deleted during the upload: upload it again`);
}

/** Throws unless the signature file is valid, and is for a package with this name. */
function checked(file: string, text: string): SignedPackage {
  const name = parsePackageName(file);
  if (!name) {
    const message =
      'must be the name of an agent package, such as farhand-agent-1.2.3-linux-x64.tar.gz: choose a package that npm run package built, and keep its name';
    throw fieldError('path', 'package', message);
  }
  const signed = parseSignatureFile(text);
  if (!signed) throw fieldError('query', 'signature', `must be the text of the file ${file}.sig`);
  if (!isSigned(name, signed)) {
    const of = `${signed.version} for ${signed.arch} (${signed.kind})`;
    throw fieldError('query', 'signature', `is the signature of version ${of}, not the signature of ${file}`);
  }
  if (signed.size > mostBytes)
    throw new AppError('payload_too_large', `the package is larger than ${mostBytes} bytes`, {
      limit: mostBytes,
    });
  return signed;
}

/**
 * Throws already_exists if a different package of the same name is stored. Machines that already run this version would
 * never get the second package.
 */
function assertSame(stored: AgentPackage | undefined, { sha256 }: SignedPackage, file: string): void {
  if (!stored || stored.sha256 === sha256) return;
  const message = `this broker already has a different package named ${file}: build a new version, or delete that package first`;
  throw new AppError('already_exists', message, { file });
}

/**
 * Throws no_space if all uploaded packages together would be too large. A package that is already stored needs no
 * further space.
 */
function assertSpace(packages: Catalog, { size, sha256 }: SignedPackage): void {
  const others = packages.filter((one) => one.uploaded && one.sha256 !== sha256);
  if (others.reduce((sum, one) => sum + one.size, size) <= mostBytesInAll) return;
  const message = `all uploaded packages together would be larger than ${mostBytesInAll} bytes: delete versions that no machine needs, with farhand packages delete`;
  throw new AppError('no_space', message, { limit: mostBytesInAll });
}

/** Writes a package to the disk. Throws validation_failed if the content is not that of the signed package. */
async function store(
  path: string,
  { size, sha256 }: SignedPackage,
  chunks: AsyncIterable<Uint8Array>,
): Promise<void> {
  const hash = createHash('sha256');
  let written = 0;
  await using handle: FileHandle = await open(
    path,
    constants.O_WRONLY | constants.O_CREAT | constants.O_EXCL,
    0o600,
  );
  for await (const chunk of chunks) {
    written += chunk.length;
    if (written > size) break;
    hash.update(chunk);
    await handle.writeFile(chunk);
  }
  if (written !== size || hash.digest('hex') !== sha256) {
    const message = 'the body differs from the signed package in size or SHA-256: upload the original again';
    throw new AppError('validation_failed', message, { size, sha256 });
  }
  await handle.sync();
}

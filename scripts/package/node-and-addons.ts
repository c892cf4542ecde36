// Copies Node and the native addons for an architecture into a package.
import { createHash } from 'node:crypto';
import { constants, copyFileSync, cpSync, existsSync, mkdirSync, readFileSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { z } from 'zod';
import { type Arch, readJson, root, run } from './shared-by-packaging-steps.ts';

const packList = z.tuple([z.object({ filename: z.string() })]);
const lockFile = z.object({ packages: z.record(z.string(), z.unknown()) });
const lockEntry = z.object({ version: z.string(), integrity: z.string() });

const cache = join(root, 'dist/.cache');

/** Copies the binary of Node and its license into a package. */
export async function addBinaries(folder: string, arch: Arch): Promise<void> {
  const node = await libraryOf(`node-linux-${arch}`);
  // Copies the file instead of creating a hard link. With a hard link, tar fails if another packaging run changes the
  // link count of the file.
  copyFileSync(join(node, 'bin/node'), join(folder, 'node'), constants.COPYFILE_FICLONE);
  cpSync(join(node, 'LICENSE'), join(folder, 'NODE-LICENSE.txt'));
}

/** Copies the native addons with which an agent starts programs and opens terminals. */
export async function addAddons(folder: string, arch: Arch): Promise<void> {
  for (const name of [`@koromix/koffi-linux-${arch}`, `@lydell/node-pty-linux-${arch}`]) {
    cpSync(await libraryOf(name), join(folder, 'node_modules', name), { recursive: true });
  }
}

/**
 * Returns the directory of a library. The library for another architecture is not installed; npm downloads it once into
 * the cache.
 */
async function libraryOf(name: string): Promise<string> {
  const installed = join(root, 'node_modules', name);
  if (existsSync(installed)) return installed;
  const { version, integrity } = locked(name);
  const folder = join(cache, `${name}-${version}`);
  if (existsSync(folder)) return join(folder, 'package');
  mkdirSync(`${folder}.new`, { recursive: true });
  const received = await run('npm', ['pack', '--json', '--pack-destination', cache, `${name}@${version}`]);
  const [packed] = packList.parse(JSON.parse(received));
  const archive = join(cache, packed.filename);
  const found = `sha512-${createHash('sha512').update(readFileSync(archive)).digest('base64')}`;
  if (found !== integrity)
    throw new Error(`the hash of ${name}@${version} differs from the one in package-lock.json: ${found}`);
  await run('tar', ['-xzf', archive, '-C', `${folder}.new`]);
  await run('mv', [`${folder}.new`, folder]);
  rmSync(archive);
  return join(folder, 'package');
}

function locked(name: string): { version: string; integrity: string } {
  const found = readJson(join(root, 'package-lock.json'), lockFile).packages[`node_modules/${name}`];
  return lockEntry.parse(found);
}

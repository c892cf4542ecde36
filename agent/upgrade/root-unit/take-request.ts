// Takes the agent's request and package as root.
// The agent can write both files, so root follows no link and verifies its own copy.
import { createHash } from 'node:crypto';
import { constants, existsSync } from 'node:fs';
import { open, rename, rm } from 'node:fs/promises';
import { isErrno, StartError } from '../../../shared/errors.ts';
import { readRegularJson } from '../../../shared/read-regular-file.ts';
import { must } from '../../../shared/systemd/control.ts';
import type { AgentSettings } from '../../settings-schema.ts';
import { fitFault, signerFault } from '../accept-and-receive-package.ts';
import {
  installedKind,
  requestSchema,
  type UpgradeRequest,
  upgradePaths,
} from '../files-shared-with-root.ts';
import { readTrustedKey } from '../trusted-key.ts';

const { O_NOFOLLOW, O_NONBLOCK, O_RDONLY } = constants;
const pieceBytes = 1024 * 1024;

/**
 * Takes the agent's request; returns undefined if there is none. Throws if the request is invalid. `interrupted`: true
 * if an earlier run took the request but did not finish.
 */
export async function takeRequest(
  directory: string,
): Promise<{ request: UpgradeRequest; interrupted: boolean } | undefined> {
  const { request, taken } = upgradePaths(directory);
  const interrupted = existsSync(taken);
  try {
    // The rename fails if the agent has withdrawn the request by removing its file. After the rename the agent can
    // neither remove nor replace the file.
    if (!interrupted) await rename(request, taken);
  } catch (error) {
    if (isErrno(error, 'ENOENT')) return undefined;
    throw error;
  }
  try {
    return { request: requestSchema.parse(await readRegularJson(taken)), interrupted };
  } catch (error) {
    await dropRequest(directory);
    throw error;
  }
}

/**
 * Removes a request that was taken. Node's rm() is unsafe here: during rm(), the agent could replace a directory by a
 * symlink.
 */
export async function dropRequest(directory: string): Promise<void> {
  await must('rm', ['-rf', '--', upgradePaths(directory).taken]);
}

/**
 * Copies the package to root's directory. Throws StartError if the owner forbids the upgrade or the package does
 * not fit the machine. Also throws if the machine does not trust the key that signed the package, or if the signature
 * does not match the package.
 */
export async function verifiedCopy(
  directory: string,
  request: UpgradeRequest,
  { allow, hold_version: holdVersion }: AgentSettings,
): Promise<void> {
  if (!allow.includes('upgrade'))
    throw new StartError('the owner of this machine does not allow upgrades (--allow)');
  const installed = installedKind(directory);
  const fault =
    fitFault(request, { installed, holdVersion }) ?? signerFault(request, readTrustedKey(directory));
  if (fault) throw new StartError(fault[2]);
  const { package: from, copy } = upgradePaths(directory);
  const { size, sha256 } = request;
  await rm(copy, { force: true });
  await using source = await open(from, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  if (!(await source.stat()).isFile()) throw new StartError('the package is not a regular file');
  await using target = await open(copy, 'wx', 0o600);
  const hash = createHash('sha256');
  let copied = 0;
  // Reads at most one byte more than `size`, because the agent may let the file grow during the copy. The check of the
  // size below then refuses the package.
  const pieces = source.createReadStream({ end: size, highWaterMark: pieceBytes });
  for await (const piece of pieces as AsyncIterable<Buffer>) {
    copied += piece.length;
    hash.update(piece);
    await target.writeFile(piece);
  }
  await target.sync();
  if (copied !== size || hash.digest('hex') !== sha256)
    throw new StartError(
      'the package does not have the size and SHA-256 that were signed; build or upload it again',
    );
}

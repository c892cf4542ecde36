// A check of `doctor` for keys that sign agent packages. On the broker's machine, such a key would let an intruder
// attack all machines.
import { createPrivateKey } from 'node:crypto';
import type { Dirent } from 'node:fs';
import { readdir, readFile, stat } from 'node:fs/promises';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { run } from '../systemd/control.ts';
import { type Finding, ok, warn } from './check-result.ts';

/** Limits of the search: depth of directories, number of entries in all, and bytes of a file that may be a key. */
const maxDepth = 3;
const maxEntries = 5_000;
const maxBytes = 8 * 1024;
/**
 * Maximum size of a file with an encrypted Ed25519 key in PEM. The type of the key cannot be read without the
 * passphrase. Node writes 302 bytes for an Ed25519 key, 412 for a P-256 key and 1,886 for an RSA key.
 */
const encryptedKeyBytes = 350;
const skipped = /^(node_modules|\.git|\.cache|\.npm|proc|sys)$/;

/**
 * Looks for signing keys in these directories, in this user's home, and in the home of the first directory's owner.
 * Skips directories that cannot be read.
 */
export async function examineSigningKeys(...directories: readonly string[]): Promise<Finding> {
  const found = new Set<string>();
  const places = [...directories, homedir(), await homeOfOwner(directories[0] ?? '')];
  for (const place of new Set(places)) await search(place, maxDepth, { entries: maxEntries }, found);
  if (found.size === 0)
    return ok(
      'signing key',
      'no key that can sign agent packages was found on this machine, as it should be',
    );
  const what = `${[...found].join(', ')} can sign agent packages: an intruder on this machine could sign packages for all machines`;
  return warn('signing key', what, 'move the key to the machine that builds packages, and delete it here');
}

/** Returns the home of a directory's owner, or the directory itself if that home is unknown. */
async function homeOfOwner(directory: string): Promise<string> {
  try {
    const { uid } = await stat(directory);
    const [, , , , , home = ''] = (await run('getent', ['passwd', String(uid)])).stdout.trim().split(':');
    return home.startsWith('/') && home !== '/' ? home : directory;
  } catch {
    return directory;
  }
}

async function search(
  directory: string,
  depth: number,
  budget: { entries: number },
  found: Set<string>,
): Promise<void> {
  const entries = await readdir(directory, { withFileTypes: true }).catch((): Dirent[] => []);
  for (const entry of entries) {
    if (budget.entries <= 0) return;
    budget.entries -= 1;
    const path = join(directory, entry.name);
    if (entry.isDirectory() && depth > 1 && !skipped.test(entry.name))
      await search(path, depth - 1, budget, found);
    else if (entry.isFile() && (await isSigningKey(path))) found.add(path);
  }
}

/** True for a PEM file with a private Ed25519 key, or with an encrypted key that may be one. */
async function isSigningKey(path: string): Promise<boolean> {
  try {
    const { size } = await stat(path);
    if (size < 64 || size > maxBytes) return false;
    const text = await readFile(path, 'latin1');
    if (text.includes('-----BEGIN ENCRYPTED PRIVATE KEY-----')) return size <= encryptedKeyBytes;
    if (!text.includes('-----BEGIN PRIVATE KEY-----')) return false;
    return createPrivateKey(text).asymmetricKeyType === 'ed25519';
  } catch {
    // The file cannot be read, or it contains no key.
    return false;
  }
}

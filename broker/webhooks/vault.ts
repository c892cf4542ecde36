// Secrets of webhooks: AES-256-GCM under a key file that lies beside the state, so that a copy of the state tells none.
import { createCipheriv, createDecipheriv, randomBytes } from 'node:crypto';
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { writeDurably } from '../../shared/durable-file.ts';
import { StartError } from '../../shared/errors.ts';

export interface Vault {
  /** Encrypts a secret for one webhook; makes the key file where there is none. */
  seal(webhookId: string, secret: string): Promise<string>;
  /** Undefined for what another key file, or webhook, encrypted. */
  open(webhookId: string, sealed: string): string | undefined;
}

/** In the data directory. */
export const vaultFile = 'webhooks.key';

const cipher = 'aes-256-gcm';
const [keyBytes, ivBytes, tagBytes] = [32, 12, 16];

/** Throws StartError for a damaged key file; one that is missing is needed only by what it encrypted. */
export function openVault(directory: string): Vault {
  const file = join(directory, vaultFile);
  let key = existsSync(file) ? read(file) : undefined;
  let making: Promise<Buffer> | undefined;

  async function make(): Promise<Buffer> {
    const fresh = randomBytes(keyBytes);
    await writeDurably(file, fresh.toString('hex'));
    key = fresh;
    return fresh;
  }

  return {
    async seal(webhookId, secret) {
      making ??= key ? Promise.resolve(key) : make();
      const used = await making.catch((error: unknown) => {
        making = undefined;
        throw error;
      });
      const iv = randomBytes(ivBytes);
      const box = createCipheriv(cipher, used, iv, { authTagLength: tagBytes }).setAAD(
        Buffer.from(webhookId),
      );
      const bytes = Buffer.concat([box.update(secret, 'utf8'), box.final()]);
      return Buffer.concat([iv, box.getAuthTag(), bytes]).toString('base64');
    },
    open(webhookId, sealed) {
      if (!key) return undefined;
      const all = Buffer.from(sealed, 'base64');
      try {
        const box = createDecipheriv(cipher, key, all.subarray(0, ivBytes), { authTagLength: tagBytes })
          .setAAD(Buffer.from(webhookId))
          .setAuthTag(all.subarray(ivBytes, ivBytes + tagBytes));
        return Buffer.concat([box.update(all.subarray(ivBytes + tagBytes)), box.final()]).toString('utf8');
      } catch {
        return undefined;
      }
    },
  };
}

function read(file: string): Buffer {
  const key = Buffer.from(readFileSync(file, 'utf8').trim(), 'hex');
  if (key.length === keyBytes) return key;
  throw new StartError(
    `${file} is damaged: put it back from a backup, or remove it and give each webhook its secret again`,
  );
}

// Encrypts secrets with AES-256-GCM. The key for the secrets of webhooks and alert channels is in a file of its own, so
// that a copy of state.json reveals no secret.
import { createCipheriv, createDecipheriv, randomBytes } from 'node:crypto';
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { writeDurably } from '../../shared/durable-file.ts';
import { StartError } from '../../shared/errors.ts';

/** Name of the key file in the data directory. */
export const vaultFile = 'webhooks.key';

const cipher = 'aes-256-gcm';
const [keyBytes, ivBytes, tagBytes] = [32, 12, 16];
const options = { authTagLength: tagBytes };

export class SecretVault {
  readonly #key: Buffer;

  /** `key` has 32 bytes. */
  constructor(key: Buffer) {
    this.#key = key;
  }

  /** Reads the key file, or creates a missing one. Throws StartError for a damaged one. */
  static async open(directory: string): Promise<SecretVault> {
    const file = join(directory, vaultFile);
    if (!existsSync(file)) await writeDurably(file, randomBytes(keyBytes).toString('hex'));
    const key = Buffer.from(readFileSync(file, 'utf8').trim(), 'hex');
    if (key.length === keyBytes) return new SecretVault(key);
    throw new StartError(
      `${file} is damaged; restore it from a backup, or remove it and set these again: the secret of each webhook, and the url and secret of each alert channel`,
    );
  }

  /** Encrypts a secret for the object with this id, such as a webhook. decrypt() needs the same id. */
  encrypt(id: string, secret: string): string {
    const iv = randomBytes(ivBytes);
    const encryption = createCipheriv(cipher, this.#key, iv, options);
    encryption.setAAD(Buffer.from(id));
    const bytes = Buffer.concat([encryption.update(secret, 'utf8'), encryption.final()]);
    return Buffer.concat([iv, encryption.getAuthTag(), bytes]).toString('base64');
  }

  /** Decrypts a secret. Returns undefined if it was encrypted with another key or for another object. */
  decrypt(id: string, encrypted: string): string | undefined {
    const all = Buffer.from(encrypted, 'base64');
    try {
      const decryption = createDecipheriv(cipher, this.#key, all.subarray(0, ivBytes), options);
      decryption.setAAD(Buffer.from(id));
      decryption.setAuthTag(all.subarray(ivBytes, ivBytes + tagBytes));
      const bytes = [decryption.update(all.subarray(ivBytes + tagBytes)), decryption.final()];
      return Buffer.concat(bytes).toString('utf8');
    } catch {
      return undefined;
    }
  }
}

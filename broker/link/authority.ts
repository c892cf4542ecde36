// The broker's own certificate authority: made once for 20 years, pinned by every join token; leaves renew by themselves.
// The certificate library needs this polyfill loaded before it.
import 'reflect-metadata';
import { createHash, createPrivateKey, createPublicKey, type webcrypto } from 'node:crypto';
import { existsSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { isIP } from 'node:net';
import { join } from 'node:path';
import type { SecureContextOptions } from 'node:tls';
import * as x509 from '@peculiar/x509';
import { z } from 'zod';
import { now } from '../../shared/clock.ts';
import { writeDurably } from '../../shared/durable-file.ts';
import { StartError } from '../../shared/errors.ts';
import { linkServerName } from '../../shared/rpc.ts';

const day = 86_400_000;
const authorityDays = 20 * 365;
const leafDays = 90;

const algorithm = { name: 'ECDSA', namedCurve: 'P-256', hash: 'SHA-256' };
const stored = z.strictObject({ certificate: z.string(), private_key: z.string() });
const storedKey = z.strictObject({ private_key: z.string() });

/** What it keeps in the data directory: the authority itself, and the key of --tls. */
const [authorityFile, restKeyFile] = ['authority.json', 'rest-key.json'] as const;
export const authorityFiles = [authorityFile, restKeyFile];

export interface Authority {
  /** SHA-256 of the CA certificate in DER, hexadecimal: what a join token pins. */
  readonly fingerprint: string;
  /** The CA certificate in PEM, for clients. */
  readonly certificate: string;
  /** What a TLS server of the link needs, with a new leaf that is good for 90 days. */
  leaf(): Promise<SecureContextOptions>;
  /** The same for the REST API under these names and addresses, with one key for ever: its pin outlives the leaves. */
  rest(names: readonly string[]): Promise<{ pin: string; leaf(): Promise<SecureContextOptions> }>;
}

/** Reads the authority of a directory, or makes it where nothing was ever declared. Throws StartError when it is lost. */
export async function openAuthority(directory: string, mayMake: boolean): Promise<Authority> {
  const file = join(directory, authorityFile);
  if (!existsSync(file)) {
    if (!mayMake) {
      throw new StartError(
        `${file} is missing: every agent pins it; restore it from a backup of ${directory}`,
      );
    }
    await makeAuthority(file);
  }
  return readAuthority(file, join(directory, restKeyFile));
}

async function makeAuthority(file: string): Promise<void> {
  const keys = await crypto.subtle.generateKey(algorithm, true, ['sign', 'verify']);
  const certificate = await x509.X509CertificateGenerator.createSelfSigned(
    {
      name: 'CN=Farhand broker CA',
      keys,
      notBefore: new Date(now() - day),
      notAfter: new Date(now() + authorityDays * day),
      signingAlgorithm: algorithm,
      extensions: [
        new x509.BasicConstraintsExtension(true, 0, true),
        new x509.KeyUsagesExtension(x509.KeyUsageFlags.keyCertSign | x509.KeyUsageFlags.cRLSign, true),
        await x509.SubjectKeyIdentifierExtension.create(keys.publicKey),
      ],
    },
    crypto,
  );
  const content = { certificate: certificate.toString('pem'), private_key: await exportKey(keys.privateKey) };
  await writeDurably(file, JSON.stringify(content));
}

async function readAuthority(file: string, restKeyFile: string): Promise<Authority> {
  const content = stored.safeParse(parse(await readFile(file, 'utf8')));
  if (!content.success) throw new StartError(`${file} is damaged: restore it from a backup`);
  const issuer = new x509.X509Certificate(content.data.certificate);
  const { privateKey: key } = await importKeys(content.data.private_key);
  return {
    fingerprint: createHash('sha256').update(Buffer.from(issuer.rawData)).digest('hex'),
    certificate: `${issuer.toString('pem')}\n`,
    async leaf() {
      const keys = await crypto.subtle.generateKey(algorithm, true, ['sign', 'verify']);
      const leaf = await makeLeaf({ issuer, key }, linkServerName, [linkServerName], keys);
      return { minVersion: 'TLSv1.3', ...leaf };
    },
    async rest(names) {
      const pem = await openRestKey(restKeyFile);
      const keys = await importKeys(pem);
      return { pin: pinOf(pem), leaf: () => makeLeaf({ issuer, key }, 'Farhand REST API', names, keys) };
    },
  };
}

function parse(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** The key of the REST API's leaves, made when it is first needed. */
async function openRestKey(file: string): Promise<string> {
  if (!existsSync(file)) {
    const { privateKey } = await crypto.subtle.generateKey(algorithm, true, ['sign', 'verify']);
    await writeDurably(file, JSON.stringify({ private_key: await exportKey(privateKey) }));
  }
  const content = storedKey.safeParse(parse(await readFile(file, 'utf8')));
  if (!content.success) {
    throw new StartError(
      `${file} is damaged: restore it from a backup, or move it away and pin the new key everywhere`,
    );
  }
  return content.data.private_key;
}

/** As curl takes it. */
function pinOf(pem: string): string {
  const der = createPublicKey(pem).export({ format: 'der', type: 'spki' });
  return `sha256//${createHash('sha256').update(der).digest('base64')}`;
}

interface Issuer {
  issuer: x509.X509Certificate;
  key: webcrypto.CryptoKey;
}

async function makeLeaf(
  { issuer, key }: Issuer,
  subject: string,
  names: readonly string[],
  keys: { publicKey: webcrypto.CryptoKey; privateKey: webcrypto.CryptoKey },
): Promise<SecureContextOptions> {
  const alternatives = names.map((value) => ({
    type: isIP(value) ? ('ip' as const) : ('dns' as const),
    value,
  }));
  const certificate = await x509.X509CertificateGenerator.create(
    {
      subject: `CN=${subject}`,
      issuer: issuer.subject,
      publicKey: keys.publicKey,
      signingKey: key,
      notBefore: new Date(now() - day),
      notAfter: new Date(now() + leafDays * day),
      signingAlgorithm: algorithm,
      extensions: [
        new x509.BasicConstraintsExtension(false, undefined, true),
        new x509.ExtendedKeyUsageExtension([x509.ExtendedKeyUsage.serverAuth]),
        new x509.SubjectAlternativeNameExtension(alternatives),
        await x509.AuthorityKeyIdentifierExtension.create(issuer),
      ],
    },
    crypto,
  );
  return {
    // The chain carries the CA, so that a joining agent can compare it with the pin in its token.
    cert: `${certificate.toString('pem')}\n${issuer.toString('pem')}`,
    key: await exportKey(keys.privateKey),
  };
}

/** Both halves of a private key in PEM. */
async function importKeys(
  pem: string,
): Promise<{ privateKey: webcrypto.CryptoKey; publicKey: webcrypto.CryptoKey }> {
  const pkcs8 = createPrivateKey(pem).export({ format: 'der', type: 'pkcs8' });
  const spki = createPublicKey(pem).export({ format: 'der', type: 'spki' });
  return {
    privateKey: await crypto.subtle.importKey('pkcs8', pkcs8, algorithm, true, ['sign']),
    publicKey: await crypto.subtle.importKey('spki', spki, algorithm, true, ['verify']),
  };
}

async function exportKey(key: webcrypto.CryptoKey): Promise<string> {
  const der = Buffer.from(await crypto.subtle.exportKey('pkcs8', key));
  return createPrivateKey({ key: der, format: 'der', type: 'pkcs8' })
    .export({ format: 'pem', type: 'pkcs8' })
    .toString();
}

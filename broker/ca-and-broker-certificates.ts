// The broker's own certificate authority (CA), which join tokens pin. Its server certificates ("leaves") are renewed
// while the broker runs.

// @peculiar/x509 works only if this module is imported first.
import 'reflect-metadata';
import {
  createHash,
  createPrivateKey,
  createPublicKey,
  generateKeyPairSync,
  type webcrypto,
} from 'node:crypto';
import { existsSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { isIP } from 'node:net';
import { join } from 'node:path';
import type { SecureContextOptions } from 'node:tls';
import * as x509 from '@peculiar/x509';
import { z } from 'zod';
import { linkServerName } from '../shared/agent-rpcs.ts';
import { every, now } from '../shared/clock.ts';
import { writeDurably } from '../shared/durable-file.ts';
import { StartError } from '../shared/errors.ts';
import type { Logger } from '../shared/logger.ts';

const day = 86_400_000;
const authorityDays = 20 * 365;
const leafDays = 90;
const renewalMs = 30 * day;
/**
 * After the clock was set back, the creation of a leaf may lie in the future. If it lies more than this many
 * milliseconds ahead, a new leaf is made. A leaf is valid only from one day before its creation, so the old
 * leaf might not be valid yet.
 */
const backMs = day / 2;
const renewalCheckMs = 60_000;

/** Name in the certificates of brokers, by which brokers recognize each other at their peer ports. */
export const peerName = 'farhand-broker-peer';

const algorithm = { name: 'ECDSA', namedCurve: 'P-256', hash: 'SHA-256' };
const stored = z.strictObject({ certificate: z.string(), private_key: z.string() });
const storedKey = z.strictObject({ private_key: z.string() });

/** Files in the data directory: the CA certificate with its key, and the private key for --tls. */
const [authorityFile, restKeyFile] = ['authority.json', 'rest-key.json'] as const;
export const authorityFiles = [authorityFile, restKeyFile] as const;

/** TLS options of a broker for connections with other brokers, all in PEM. */
export interface PeerLeaf {
  minVersion: 'TLSv1.3';
  ca: string;
  cert: string;
  key: string;
}

export type Authority = Awaited<ReturnType<typeof readAuthority>>;

/**
 * Reads the authority. Creates a missing file if `mayCreate` is true, otherwise throws StartError with the advice
 * `remedy`. Throws StartError for a damaged file.
 */
export async function loadAuthority(
  directory: string,
  mayCreate: boolean,
  remedy = `restore it from a backup of ${directory}`,
): Promise<Authority> {
  const file = join(directory, authorityFile);
  if (!existsSync(file)) {
    if (!mayCreate) {
      throw new StartError(
        `${file} is missing: this file contains the certificate authority (CA) that every agent trusts; ${remedy}`,
      );
    }
    await createAuthority(file);
  }
  return readAuthority(file, join(directory, restKeyFile));
}

async function createAuthority(file: string): Promise<void> {
  const pem = newKey();
  const keys = keysOf(pem);
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
  await writeDurably(file, JSON.stringify({ certificate: certificate.toString('pem'), private_key: pem }));
}

async function readAuthority(file: string, restKeyFile: string) {
  const { certificate: pem, private_key } = await readStored(file, stored, 'restore this file from a backup');
  const certificate = new x509.X509Certificate(pem);
  const issuer = { certificate, key: keysOf(private_key).privateKey };
  return {
    /** SHA-256 of the CA certificate in DER, as hexadecimal digits. Join tokens pin this value. */
    fingerprint: createHash('sha256').update(Buffer.from(certificate.rawData)).digest('hex'),
    /** The CA certificate in PEM, for clients. */
    certificate: `${certificate.toString('pem')}\n`,
    /** Makes the TLS options for the gRPC port, with a new leaf that is valid for 90 days. */
    async leaf(): Promise<SecureContextOptions> {
      const leaf = await makeLeaf(issuer, linkServerName, [linkServerName], newKey());
      return { minVersion: 'TLSv1.3', ...leaf };
    },
    /**
     * Makes the TLS options for connections between brokers, with a new leaf. Peer ports accept only certificates with
     * `peerName`, which only these leaves have.
     */
    async peer(): Promise<PeerLeaf> {
      const leaf = await makeLeaf(issuer, peerName, [peerName], newKey(), [serverAuth, clientAuth]);
      return { minVersion: 'TLSv1.3', ca: certificate.toString('pem'), ...leaf };
    },
    /**
     * Returns the pin of the REST API's key, and a function that makes a certificate for these names and addresses. The
     * key never changes, so the pin remains valid when the certificate is renewed.
     */
    async rest(names: readonly string[]) {
      const pem = await loadRestKey(restKeyFile);
      return { pin: pinOf(pem), leaf: () => makeLeaf(issuer, 'Farhand REST API', names, pem) };
    },
  };
}

/** Makes and applies a new leaf every 30 days, until the returned function is called. */
export function renewLeaves<Leaf extends SecureContextOptions>(
  make: () => Promise<Leaf>,
  apply: (leaf: Leaf) => void,
  log: Logger,
): () => void {
  // Wall time is used, because the monotonic clock stops while the computer sleeps.
  let made = now();
  const renew = async (): Promise<void> => {
    const at = now();
    apply(await make());
    made = at;
  };
  return every(renewalCheckMs, () => {
    const age = now() - made;
    if (age < renewalMs && age > -backMs) return;
    const text = 'the TLS certificate could not be renewed; trying again in a minute';
    renew().catch((error: unknown) => log.error({ err: error }, text));
  });
}

/** Reads and checks a JSON file. If the file is damaged, throws StartError with `remedy` as advice. */
async function readStored<T>(file: string, schema: z.ZodType<T>, remedy: string): Promise<T> {
  const text = await readFile(file, 'utf8');
  try {
    return schema.parse(JSON.parse(text));
  } catch (error) {
    throw new StartError(`${file} is damaged: ${remedy}`, undefined, { cause: error });
  }
}

/** Reads the private key for the certificates of the REST API. Creates the key on first use. */
async function loadRestKey(file: string): Promise<string> {
  if (!existsSync(file)) await writeDurably(file, JSON.stringify({ private_key: newKey() }));
  const remedy =
    'restore this file from a backup; if there is none, move the file away, start the broker, and give every client the new pin';
  return (await readStored(file, storedKey, remedy)).private_key;
}

/** Returns the SHA-256 of the public key in the form of curl's --pinnedpubkey. */
function pinOf(pem: string): string {
  const der = createPublicKey(pem).export({ format: 'der', type: 'spki' });
  return `sha256//${createHash('sha256').update(der).digest('base64')}`;
}

const { serverAuth, clientAuth } = x509.ExtendedKeyUsage;

interface Issuer {
  certificate: x509.X509Certificate;
  key: webcrypto.CryptoKey;
}

async function makeLeaf(
  issuer: Issuer,
  subject: string,
  names: readonly string[],
  pem: string,
  usages: x509.ExtendedKeyUsageType[] = [serverAuth],
): Promise<{ cert: string; key: string }> {
  const alternatives = names.map((value) => ({ type: isIP(value) ? 'ip' : 'dns', value }) as const);
  const certificate = await x509.X509CertificateGenerator.create(
    {
      subject: `CN=${subject}`,
      issuer: issuer.certificate.subject,
      publicKey: keysOf(pem).publicKey,
      signingKey: issuer.key,
      notBefore: new Date(now() - day),
      notAfter: new Date(now() + leafDays * day),
      signingAlgorithm: algorithm,
      extensions: [
        new x509.BasicConstraintsExtension(false, undefined, true),
        new x509.ExtendedKeyUsageExtension(usages),
        new x509.SubjectAlternativeNameExtension(alternatives),
        await x509.AuthorityKeyIdentifierExtension.create(issuer.certificate),
      ],
    },
    crypto,
  );
  // The chain includes the CA, so that a joining agent can compare the CA with the pin in its token.
  return { cert: `${certificate.toString('pem')}\n${issuer.certificate.toString('pem')}`, key: pem };
}

/** Makes a new private key in PEM. */
function newKey(): string {
  const { privateKey } = generateKeyPairSync('ec', { namedCurve: algorithm.namedCurve });
  return privateKey.export({ format: 'pem', type: 'pkcs8' }).toString();
}

/** Imports a private key in PEM, and derives its public key. */
function keysOf(pem: string): { privateKey: webcrypto.CryptoKey; publicKey: webcrypto.CryptoKey } {
  return {
    privateKey: createPrivateKey(pem).toCryptoKey(algorithm, true, ['sign']),
    publicKey: createPublicKey(pem).toCryptoKey(algorithm, true, ['verify']),
  };
}

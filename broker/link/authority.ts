// The broker's own certificate authority: made once for 20 years, pinned by every join token; leaves renew by themselves.
// The certificate library needs this polyfill loaded before it.
import 'reflect-metadata';
import { createHash, createPrivateKey, type webcrypto } from 'node:crypto';
import { existsSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
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
/** Leaves are renewed when this much of their time is left. */
export const leafRenewalMs = 30 * day;

const algorithm = { name: 'ECDSA', namedCurve: 'P-256', hash: 'SHA-256' };
const stored = z.strictObject({ certificate: z.string(), private_key: z.string() });

export interface Authority {
  /** SHA-256 of the CA certificate in DER, hexadecimal: what a join token pins. */
  readonly fingerprint: string;
  /** The CA certificate in PEM, for clients. */
  readonly certificate: string;
  /** What a TLS server of the link needs, with a new leaf that is good for 90 days. */
  leaf(): Promise<SecureContextOptions>;
}

/** Reads the authority of a directory, or makes it where nothing was ever declared. Throws StartError when it is lost. */
export async function openAuthority(directory: string, mayMake: boolean): Promise<Authority> {
  const file = join(directory, 'authority.json');
  if (!existsSync(file)) {
    if (!mayMake) {
      throw new StartError(
        `${file} is missing: every agent pins it; restore it from a backup of ${directory}`,
      );
    }
    await makeAuthority(file);
  }
  return readAuthority(file);
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

async function readAuthority(file: string): Promise<Authority> {
  const content = stored.safeParse(parse(await readFile(file, 'utf8')));
  if (!content.success) throw new StartError(`${file} is damaged: restore it from a backup`);
  const issuer = new x509.X509Certificate(content.data.certificate);
  const der = createPrivateKey(content.data.private_key).export({ format: 'der', type: 'pkcs8' });
  const key = await crypto.subtle.importKey('pkcs8', der, algorithm, false, ['sign']);
  return {
    fingerprint: createHash('sha256').update(Buffer.from(issuer.rawData)).digest('hex'),
    certificate: `${issuer.toString('pem')}\n`,
    leaf: () => makeLeaf(issuer, key),
  };
}

function parse(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

async function makeLeaf(
  issuer: x509.X509Certificate,
  issuerKey: webcrypto.CryptoKey,
): Promise<SecureContextOptions> {
  const keys = await crypto.subtle.generateKey(algorithm, true, ['sign', 'verify']);
  const certificate = await x509.X509CertificateGenerator.create(
    {
      subject: `CN=${linkServerName}`,
      issuer: issuer.subject,
      publicKey: keys.publicKey,
      signingKey: issuerKey,
      notBefore: new Date(now() - day),
      notAfter: new Date(now() + leafDays * day),
      signingAlgorithm: algorithm,
      extensions: [
        new x509.BasicConstraintsExtension(false, undefined, true),
        new x509.ExtendedKeyUsageExtension([x509.ExtendedKeyUsage.serverAuth]),
        new x509.SubjectAlternativeNameExtension([{ type: 'dns', value: linkServerName }]),
        await x509.AuthorityKeyIdentifierExtension.create(issuer),
      ],
    },
    crypto,
  );
  return {
    minVersion: 'TLSv1.3',
    // The chain carries the CA, so that a joining agent can compare it with the pin in its token.
    cert: `${certificate.toString('pem')}\n${issuer.toString('pem')}`,
    key: await exportKey(keys.privateKey),
  };
}

async function exportKey(key: webcrypto.CryptoKey): Promise<string> {
  const der = Buffer.from(await crypto.subtle.exportKey('pkcs8', key));
  return createPrivateKey({ key: der, format: 'der', type: 'pkcs8' })
    .export({ format: 'pem', type: 'pkcs8' })
    .toString();
}

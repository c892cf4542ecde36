// The TLS certificate of the REST API: read from files, or issued by the broker's own certificate authority (CA).
import { X509Certificate } from 'node:crypto';
import { readFile, stat } from 'node:fs/promises';
import { hostname, userInfo } from 'node:os';
import { createSecureContext, type SecureContextOptions } from 'node:tls';
import { every } from '../../shared/clock.ts';
import { errnoOf, StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Certificate } from '../alerts/index.ts';
import { type Authority, renewLeaves } from '../ca-and-broker-certificates.ts';
import type { BrokerSettings } from '../settings-schema.ts';

type Apply = (context: SecureContextOptions) => void;

interface Pair {
  cert: string;
  key: string;
}

interface ServerCertificate {
  context: SecureContextOptions;
  /**
   * `sha256//BASE64` of the certificate's public key if the broker's own CA issued the certificate, otherwise empty.
   */
  pin: string;
  /** True if browsers trust the certificate. */
  isPublic: boolean;
  /**
   * Calls `apply` whenever there is a newer certificate, which then serves new connections. Open connections stay open.
   * The returned function stops the calls.
   */
  follow(apply: Apply): () => void;
}

/**
 * Returns the certificate that the settings choose; undefined without TLS. Files are checked for changes every
 * `checkMs` milliseconds. Throws StartError.
 */
export async function certificateOf(
  settings: BrokerSettings,
  authority: Authority,
  checkMs: number,
  log: Logger,
): Promise<ServerCertificate | undefined> {
  const { tls, tls_cert, tls_key } = settings;
  if (tls && (tls_cert ?? tls_key))
    throw new StartError('--tls and --tls-cert cannot be used together: choose one');
  if (tls_cert !== undefined && tls_key !== undefined)
    return fromFiles({ cert: tls_cert, key: tls_key }, checkMs, log);
  if (tls_cert !== undefined) throw new StartError('--tls-cert also needs --tls-key FILE');
  if (tls_key !== undefined) throw new StartError('--tls-key also needs --tls-cert FILE');
  return tls ? ofAuthority(authority, namesOf(settings), log) : undefined;
}

/** Returns the expiry times of the CA's certificate and, if --tls-cert is set, of the certificate in that file. */
export async function expiryDates(
  { tls_cert }: BrokerSettings,
  authority: Authority,
): Promise<Certificate[]> {
  const expiry = (pem: string): number => new X509Certificate(pem).validToDate.getTime();
  const own: Certificate = { id: 'authority', expires: expiry(authority.certificate) };
  if (tls_cert === undefined) return [own];
  return [own, { id: 'tls', expires: expiry(await readFile(tls_cert, 'utf8')) }];
}

async function ofAuthority(authority: Authority, names: string[], log: Logger) {
  const { pin, leaf } = await authority.rest(names);
  return {
    context: await leaf(),
    pin,
    isPublic: false,
    follow: (apply: Apply) => renewLeaves(leaf, apply, log),
  };
}

/** Names and addresses with which clients may connect to this broker. */
function namesOf({ public_url, http }: BrokerSettings): string[] {
  const published = public_url === undefined ? [] : [new URL(public_url).hostname.replace(/^\[|\]$/g, '')];
  const anywhere = ['0.0.0.0', '::'];
  const all = [...published, http.host, 'localhost', '127.0.0.1', '::1', hostname()];
  return [...new Set(all)].filter((name) => name !== '' && !anywhere.includes(name));
}

async function fromFiles(files: Pair, lookMs: number, log: Logger) {
  let version = await versionOf(files);
  const context = await read(files).catch((error: unknown) => {
    throw new StartError(`--tls-cert ${files.cert}, --tls-key ${files.key}: ${reasonOf(error, files)}`, 78, {
      cause: error,
    });
  });
  return {
    context,
    pin: '',
    isPublic: true,
    follow(apply: Apply) {
      const check = async (): Promise<void> => {
        const current = await versionOf(files);
        if (current === version) return;
        version = current;
        apply(await read(files));
        log.info(files, 'the changed TLS certificate is now in use');
      };
      const failed = (error: unknown): void =>
        log.error(
          { ...files, reason: reasonOf(error, files) },
          'the new TLS certificate cannot be used, so the old one stays in use until these files are corrected',
        );
      return every(lookMs, () => void check().catch(failed));
    },
  };
}

/** Reads a certificate and its key. Throws if they do not belong together. */
async function read({ cert, key }: Pair): Promise<SecureContextOptions> {
  const context = { cert: await readFile(cert, 'utf8'), key: await readFile(key, 'utf8') };
  // Node ignores an empty certificate or key.
  if (context.cert === '') throw new Error(`${cert} is empty`);
  if (context.key === '') throw new Error(`${key} is empty`);
  createSecureContext(context);
  return context;
}

/**
 * Returns a text that changes whenever one of the two files changes or disappears. Symbolic links are followed, because
 * certificate programs replace the targets of such links.
 */
async function versionOf({ cert, key }: Pair): Promise<string> {
  const versions = [cert, key].map(async (file) => {
    const found = await stat(file, { bigint: true }).catch(() => undefined);
    // The time of the last change of the inode also changes with the permissions of the file.
    return found ? `${found.dev} ${found.ino} ${found.size} ${found.ctimeNs}` : 'none';
  });
  return (await Promise.all(versions)).join(', ');
}

/** Returns a clear message for a common mistake, otherwise the message of OpenSSL or of the system. */
function reasonOf(error: unknown, { key }: Pair): string {
  const text = error instanceof Error ? error.message : String(error);
  if (errnoOf(error) === 'EACCES')
    return `the broker’s user, ${userInfo().username}, must be able to read the certificate and its key (${text})`;
  if (/key values mismatch/.test(text)) return 'the key does not belong to the certificate';
  if (/DECODER routines::unsupported/.test(text))
    return `${key} has no private key in PEM; set --tls-key to the file with the certificate’s key`;
  if (/no start line|PEM routines/.test(text))
    return `the certificate or the key is not a PEM file (${text})`;
  return text;
}

// Joins this machine to a broker: creates the machine's key, and gets its machine id from the broker. Later starts read
// both from the disk.
import {
  createHash,
  createPrivateKey,
  createPublicKey,
  generateKeyPairSync,
  X509Certificate,
} from 'node:crypto';
import { once } from 'node:events';
import { readFile } from 'node:fs/promises';
import { arch, hostname } from 'node:os';
import { connect } from 'node:tls';
import { linkServerName } from '../shared/agent-rpcs.ts';
import { writeDurably } from '../shared/durable-file.ts';
import { AppError, errnoOf, isErrno, StartError } from '../shared/errors.ts';
import { rawPublicKey } from '../shared/identity-proof.ts';
import { parseJoinToken } from '../shared/join-token.ts';
import { identityFile, readIdentity, type StoredIdentity } from '../shared/read-agent-identity.ts';
import { hostPort } from '../shared/read-settings.ts';
import { atPath, reasonOf } from '../shared/system-error-messages.ts';
import { version } from '../shared/version.ts';
import { enrollWith } from './link/dial.ts';
import type { Identity } from './link/index.ts';

export interface JoinParams {
  /** HOST:PORT of the broker's port for agents. */
  broker: string;
  joinToken: string | undefined;
  /** The file from which the token was read. */
  joinTokenFile?: string | undefined;
  name: string | undefined;
  tags: string[];
}

/**
 * Reads a file that contains a join token. Throws StartError if the file cannot be read. Returns undefined if the file
 * is missing and `mayBeMissing` is set.
 */
export function readTokenFile(file: string, mayBeMissing = false): Promise<string | undefined> {
  return readFile(file, 'utf8').catch((error: unknown) => {
    if (mayBeMissing && isErrno(error, 'ENOENT')) return undefined;
    throw new StartError(`--join-token-file: ${reasonOf(atPath(error, file))}`);
  });
}

/**
 * Reads the identity in a data directory, or joins the broker with a join token. Throws AppError if a later
 * attempt may succeed, and StartError otherwise.
 */
export async function loadIdentity(directory: string, params: JoinParams): Promise<Identity> {
  const file = identityFile(directory);
  const found = await readIdentity(directory);
  if (found?.machine_id && !mayReplace(found, params.joinToken)) return identityOf(found, found.machine_id);
  const token = params.joinToken ? parseJoinToken(params.joinToken, params.joinTokenFile) : undefined;
  if (!token) {
    throw new StartError(
      'this machine has not joined a broker yet; create a join token with `farhand join-tokens create`, and start the agent once with --join-token-file FILE',
    );
  }
  const { secret, fingerprint } = token;
  const ca = await pinnedAuthority(params.broker, fingerprint);
  // If the stored identity has a machine id, the broker has removed that machine. Its identity is then replaced only
  // after the broker has accepted the token, so that a refused token changes nothing.
  const before = found?.machine_id ? found.next : found;
  const isRepeat = before?.fingerprint === fingerprint && before.token_hash === hashOf(secret);
  const pending = { ...(isRepeat ? before : freshKey(ca, fingerprint)), token_hash: hashOf(secret) };
  await writeDurably(file, JSON.stringify(found?.machine_id ? { ...found, next: pending } : pending));
  const { machine_id: machineId } = await enrollWith(params.broker, ca, {
    token: secret,
    public_key: rawPublicKey(createPublicKey(pending.private_key)),
    name: params.name ?? hostname(),
    tags: params.tags,
    host: { hostname: hostname(), os: process.platform, arch: arch() },
    agent_version: version,
  });
  await writeDurably(file, JSON.stringify({ ...pending, machine_id: machineId }));
  return identityOf(pending, machineId);
}

function freshKey(ca: string, fingerprint: string): StoredIdentity {
  const { privateKey } = generateKeyPairSync('ed25519');
  const pem = privateKey.export({ format: 'pem', type: 'pkcs8' }).toString();
  return { machine_id: null, private_key: pem, ca_certificate: ca, fingerprint };
}

/** True if the machine may join again: the broker has removed it, and the token is a new one. */
const mayReplace = ({ removed, token_hash }: StoredIdentity, token: string | undefined): boolean =>
  removed === true && !!token && token_hash !== hashOf(parseJoinToken(token).secret);

/** Stores in the identity file that the broker has removed this machine. */
export async function markRemoved(directory: string): Promise<void> {
  const found = await readIdentity(directory);
  if (found) await writeDurably(identityFile(directory), JSON.stringify({ ...found, removed: true }));
}

const hashOf = (text: string): string => createHash('sha256').update(text).digest('hex');

function identityOf(from: StoredIdentity, machineId: string): Identity {
  return {
    machineId,
    privateKey: createPrivateKey(from.private_key),
    caCertificate: from.ca_certificate,
    fingerprint: from.fingerprint,
  };
}

/** Gets the broker's CA certificate (PEM). Throws unless its SHA-256 is the fingerprint in the join token. */
async function pinnedAuthority(broker: string, fingerprint: string): Promise<string> {
  const socket = connect({
    ...hostPort.parse(broker),
    servername: linkServerName,
    ALPNProtocols: ['h2'],
    // An unverified connection is safe here: nothing is sent, and the certificate is compared with the
    // fingerprint.
    rejectUnauthorized: false,
    timeout: 10_000,
  });
  socket.once('timeout', () => socket.destroy(new Error('no answer within 10 s')));
  try {
    await once(socket, 'secureConnect');
  } catch (error) {
    throw unreachable(broker, error);
  }
  const issuer = socket.getPeerCertificate(true).issuerCertificate?.raw;
  socket.destroy();
  if (!issuer || createHash('sha256').update(issuer).digest('hex') !== fingerprint) throw wrongBroker(broker);
  return new X509Certificate(issuer).toString();
}

/** Returns the error of a failed connection: an AppError, because a later attempt may succeed. */
function unreachable(broker: string, cause: unknown): AppError {
  const why =
    reasons[errnoOf(cause) ?? ''] ??
    `cannot be reached (${errnoOf(cause) ?? 'no answer'}); check the address and the network`;
  return new AppError('unavailable', `${broker} ${why}`, {}, { cause });
}

const notTheLink =
  'is not the broker’s port for agents; use 8421 in --broker, or the port that the broker’s --grpc sets';
/** Explanations of common connection errors. The first three mean that the port serves HTTPS or plain HTTP. */
const reasons: Readonly<Record<string, string>> = {
  ERR_SSL_TLSV1_ALERT_NO_APPLICATION_PROTOCOL: notTheLink,
  ERR_SSL_WRONG_VERSION_NUMBER: notTheLink,
  ERR_SSL_PACKET_LENGTH_TOO_LONG: notTheLink,
  ECONNREFUSED: 'refused the connection; check that the broker runs and that the port is right',
  ENOTFOUND: 'has no address: check the host name and the DNS settings of this machine',
};

function wrongBroker(broker: string): StartError {
  return new StartError(
    `the join token is not from the broker at ${broker}: the token does not match the CA certificate of that broker. The token was not sent. Check --broker and the token.`,
  );
}

// Makes connections that fetch alone cannot make: over a socket file, with a private certificate authority, with a
// pinned key, or silent for minutes.
import { createHash, X509Certificate } from 'node:crypto';
import { readFileSync } from 'node:fs';
import type { Socket } from 'node:net';
import { TLSSocket } from 'node:tls';
import * as undici from 'undici';
import { StartError } from '../../shared/errors.ts';
import type { FarhandOptions } from '../../shared/sdk/index.ts';
import { atPath, reasonOf } from '../../shared/system-error-messages.ts';

/** How the broker's certificate is verified. */
export interface Trust {
  /**
   * Hash of the public key that the broker must have, as `sha256//BASE64`. If several keys are allowed, their hashes
   * are separated by semicolons.
   */
  pin?: string | undefined;
  /** File of the certificate authority that signed the broker's certificate. */
  ca?: string | undefined;
  /** True if the API key may be sent over an unencrypted network connection. */
  insecure?: boolean | undefined;
}

export interface Transport {
  options: Required<Pick<FarhandOptions, 'fetch' | 'webSocket'>>;
  close(): Promise<void>;
}

/**
 * Returns a transport whose connections are made as `how` says. It waits for answers without a time limit. fetch alone
 * fails after 300 s of silence, but a quiet command, a large copy and a backup take longer.
 */
export function through(
  how: undici.buildConnector.connector | undici.buildConnector.BuildOptions,
  Dispatcher: typeof undici.Agent | typeof undici.EnvHttpProxyAgent = undici.Agent,
): Transport {
  const connector = typeof how === 'function' ? how : undici.buildConnector({ allowH2: false, ...how });
  const sockets = new Set<Socket>();
  const connect: undici.buildConnector.connector = (options, callback) =>
    connector(options, (...result) => {
      const [, socket] = result;
      if (socket) sockets.add(socket.once('close', () => sockets.delete(socket)));
      callback(...result);
    });
  const dispatcher = new Dispatcher({ connect, headersTimeout: 0, bodyTimeout: 0 });
  return {
    options: {
      // The cast is safe: undici's fetch is the global fetch with a dispatcher; only its types differ.
      fetch: ((url: string, init: object) =>
        undici.fetch(url, { ...init, dispatcher })) as unknown as typeof fetch,
      webSocket: (url) => new undici.WebSocket(url, { dispatcher }),
    },
    close() {
      // dispatcher.destroy() does not end the connection of a WebSocket. Input that was written before is still sent.
      for (const socket of sockets) socket.destroySoon();
      return dispatcher.destroy();
    },
  };
}

export function createTransport({ pin, ca }: Trust): Transport {
  if (pin) return through(pinned(readPins(pin)));
  if (ca) return through({ ca: readAuthority(ca) });
  // Like fetch, uses the proxy of the environment if NODE_USE_ENV_PROXY is 1.
  return through({}, process.env.NODE_USE_ENV_PROXY === '1' ? undici.EnvHttpProxyAgent : undici.Agent);
}

function readAuthority(file: string): string {
  const text = readText(file);
  if (holdsCertificate(text)) return text;
  throw new StartError(
    `FARHAND_CA: ${file} holds no certificate; give a PEM file with -----BEGIN CERTIFICATE-----`,
  );
}

function readText(file: string): string {
  try {
    return readFileSync(file, 'utf8');
  } catch (error) {
    throw new StartError(`FARHAND_CA: ${reasonOf(atPath(error, file))}`);
  }
}

/**
 * True if the first certificate of a PEM text is valid. This check is needed because Node ignores a text that contains
 * no certificate.
 */
function holdsCertificate(text: string): boolean {
  try {
    return Boolean(new X509Certificate(text));
  } catch {
    return false;
  }
}

function readPins(text: string): string[] {
  const pins = text.split(';').map((one) => one.trim());
  const bad = pins.find((one) => !/^sha256\/\/[A-Za-z0-9+/]{43}=$/.test(one));
  if (bad === undefined) return pins;
  throw new StartError(
    `the pin ${bad} must have the form sha256//BASE64; to print the right pin, run farhand whoami --data-dir DIR on the broker’s machine`,
  );
}

/** Returns a connector of undici that connects only over https, and verifies only the server's public key. */
function pinned(pins: readonly string[]): undici.buildConnector.connector {
  // TLS sessions are not resumed: on a resumed connection the server sends no certificate, so its key could not be
  // verified.
  const connect = undici.buildConnector({ rejectUnauthorized: false, maxCachedSessions: 0 });
  return (options, callback) => {
    if (options.protocol !== 'https:')
      return callback(new Error('a pinned public key needs an https URL of the broker'), null);
    connect(options, (error, socket) => {
      if (error || !socket) return callback(error ?? new Error('no connection'), null);
      const found = pinOf(socket);
      if (found && pins.includes(found)) return callback(null, socket);
      socket.destroy();
      callback(
        new Error(
          `the broker’s public key (${found ?? 'none'}) is not the pinned one; check --pin or FARHAND_PIN`,
        ),
        null,
      );
    });
  };
}

/**
 * Returns the server's key (SubjectPublicKeyInfo) as `sha256//BASE64` (RFC 7469); undefined if the server
 * sent no certificate.
 */
function pinOf(socket: unknown): string | undefined {
  const certificate = socket instanceof TLSSocket ? socket.getPeerX509Certificate() : undefined;
  const key = certificate?.publicKey.export({ type: 'spki', format: 'der' });
  return key && `sha256//${createHash('sha256').update(key).digest('base64')}`;
}

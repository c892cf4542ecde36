// Ways to a broker other than plain fetch: a socket file, an authority of its own, a pinned key.
import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { TLSSocket } from 'node:tls';
import {
  Agent,
  buildConnector,
  type Dispatcher,
  WebSocket as UndiciWebSocket,
  fetch as undiciFetch,
} from 'undici';
import { StartError } from '../../shared/errors.ts';
import type { FarhandOptions } from '../../shared/sdk/index.ts';
import { atPath, reasonOf } from '../../shared/system-errors.ts';
import type { Where } from './where.ts';

export interface Way {
  options: Required<Pick<FarhandOptions, 'fetch' | 'webSocket'>>;
  close(): Promise<void>;
}

/** Everything of a client over one dispatcher. */
export function through(dispatcher: Dispatcher): Way {
  return {
    options: {
      // undici's fetch is the global one with a dispatcher; only its types are its own.
      fetch: ((url: string, init: object) =>
        undiciFetch(url, { ...init, dispatcher })) as unknown as typeof fetch,
      webSocket: (url) => new UndiciWebSocket(url, { dispatcher }),
    },
    close: () => dispatcher.destroy(),
  };
}

export function openWay({ pin, ca }: Where): Way {
  if (pin) return through(new Agent({ connect: pinned(readPins(pin)) }));
  return through(new Agent({ connect: ca ? { ca: readAuthority(ca) } : {} }));
}

function readAuthority(file: string): string {
  try {
    return readFileSync(file, 'utf8');
  } catch (error) {
    throw new StartError(`FARHAND_CA: ${reasonOf(atPath(error, file))}`);
  }
}

function readPins(text: string): string[] {
  const pins = text.split(';').map((one) => one.trim());
  const bad = pins.find((one) => !/^sha256\/\/[A-Za-z0-9+/]{43}=$/.test(one));
  if (bad === undefined) return pins;
  throw new StartError(`the pin ${bad} is not of the form sha256//BASE64`);
}

/** The key alone tells who it is: no name, no authority. Nothing is sent to any other. */
function pinned(pins: readonly string[]): buildConnector.connector {
  // A resumed connection shows no certificate.
  const connect = buildConnector({ rejectUnauthorized: false, maxCachedSessions: 0 });
  return (options, callback) => {
    if (options.protocol !== 'https:')
      return callback(new Error('a pinned broker is reached by https'), null);
    connect(options, (error, socket) => {
      if (error || !socket) return callback(error ?? new Error('no connection'), null);
      const found = pinOf(socket);
      if (found && pins.includes(found)) return callback(null, socket);
      socket.destroy();
      callback(new Error(`the broker shows another key than the pinned one (${found ?? 'none'})`), null);
    });
  };
}

/** Of the key that a server has shown and used: `sha256//BASE64` of its SubjectPublicKeyInfo (RFC 7469). */
export function pinOf(socket: unknown): string | undefined {
  const certificate = socket instanceof TLSSocket ? socket.getPeerX509Certificate() : undefined;
  const key = certificate?.publicKey.export({ type: 'spki', format: 'der' });
  return key && `sha256//${createHash('sha256').update(key).digest('base64')}`;
}

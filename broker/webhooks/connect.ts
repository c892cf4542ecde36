// Connections to receivers: every address is judged before one is tried, and what is connected to before a byte goes out.
import { isIP, type LookupFunction, type Socket } from 'node:net';
import { buildConnector } from 'undici';
import { errnoOf } from '../../shared/errors.ts';
import type { Guard } from './guard.ts';
import type { Resolve } from './resolve.ts';

export interface Connections {
  /** For undici's Agent. */
  connect: buildConnector.connector;
  /** Whether the receiver closed a connection that it had answered on before: no fault of its own. */
  wasWorn(error: unknown): boolean;
}

/** `metInternal` is told of origins whose address is not public. */
export function openConnections(
  guard: Guard,
  resolve: Resolve,
  timeout: number,
  metInternal: (origin: string) => void,
): Connections {
  const worn = new WeakSet<Error>();

  /** All addresses of a name. Rejects if webhooks must not reach one of them. */
  async function judged(name: string) {
    const addresses = await resolve(name);
    for (const address of addresses) guard.judge(address, name);
    return addresses.map((address) => ({ address, family: isIP(address) }));
  }

  const lookup: LookupFunction = (name, { all }, give) => {
    judged(name).then(
      (found) => {
        const [first] = found;
        if (!first) give(new Error('no address'), '', 0);
        else if (all) give(null, found);
        else give(null, first.address, first.family);
      },
      (error: Error) => give(error, '', 0),
    );
  };
  const connect = buildConnector({ allowH2: false, timeout, lookup });

  /** Undici hands the error of a connection on to its request. */
  function watch(socket: Socket): void {
    const before = socket.bytesRead;
    socket.on('error', (error) => {
      const left = socket.readableEnded || ['ECONNRESET', 'EPIPE'].includes(errnoOf(error) ?? '');
      if (left && socket.bytesRead > before) worn.add(error);
    });
  }

  const open: buildConnector.connector = (options, callback) => {
    // Nobody looks up what is an address already.
    const refusal = refusalOf(() => guard.judgeLiteral(options.hostname));
    if (refusal) return callback(refusal, null);
    const secure = options.protocol === 'https:';
    const port = options.port || (secure ? '443' : '80');
    connect({ ...options, port, protocol: 'http:' }, (...[error, socket]) => {
      if (!socket) return callback(error ?? new Error('not connected'), null);
      const unwanted = refusalOf(() => guard.judgeSocket(socket, options.hostname));
      if (unwanted) {
        socket.destroy();
        return callback(unwanted, null);
      }
      const { origin } = new URL(`${options.protocol}//${options.host}`);
      if (guard.isInternal(socket.remoteAddress ?? '')) metInternal(origin);
      if (secure) connect({ ...options, httpSocket: socket }, callback);
      else callback(null, socket);
    });
  };

  return {
    connect: (options, callback) =>
      open(options, (...[error, socket]) => {
        if (!socket) return callback(error ?? new Error('not connected'), null);
        watch(socket);
        callback(null, socket);
      }),
    wasWorn: (error) => error instanceof Error && worn.has(error),
  };
}

function refusalOf(judge: () => void): Error | undefined {
  try {
    judge();
    return undefined;
  } catch (error) {
    return error instanceof Error ? error : new Error(String(error));
  }
}

// Connections to receivers: every address is judged before one is tried, and what is connected to once more.
import { isIP, type LookupFunction } from 'node:net';
import { buildConnector } from 'undici';
import type { Guard } from './guard.ts';
import type { Resolve } from './resolve.ts';

/** For undici's Agent; `metInternal` is told of origins whose address is not public. */
export function connectorOf(
  guard: Guard,
  resolve: Resolve,
  timeout: number,
  metInternal: (origin: string) => void,
): buildConnector.connector {
  /** All addresses of a name. Rejects if webhooks must not reach one of them. */
  async function judged(name: string) {
    const addresses = await resolve(name);
    for (const address of addresses) guard.judge(address);
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

  return (options, callback) => {
    // Nobody looks up what is an address already.
    const refusal = refusalOf(() => guard.judgeLiteral(options.hostname));
    if (refusal) return callback(refusal, null);
    connect(options, (...[error, socket]) => {
      if (!socket) return callback(error ?? new Error('not connected'), null);
      const unwanted = refusalOf(() => guard.judgeSocket(socket));
      if (unwanted) {
        socket.destroy();
        return callback(unwanted, null);
      }
      const { origin } = new URL(`${options.protocol}//${options.host}`);
      if (guard.isInternal(socket.remoteAddress ?? '')) metInternal(origin);
      callback(null, socket);
    });
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

// Sends HTTP/2 pings on connections that have no heartbeats: the connections of clients, and the second connection of
// each agent, which carries large answers. A link's connection is pinged too once an answer stream has begun on it.
import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import type { IncomingHttpHeaders, ServerHttp2Session, ServerHttp2Stream } from 'node:http2';
import { linkService } from '../../shared/agent-rpcs.ts';
import { after } from '../../shared/clock.ts';

export interface Pings {
  /** Milliseconds from the answer to a ping until the next ping. */
  pingMs: number;
  /** Milliseconds after which the connection is ended if a ping has no answer. */
  pongMs: number;
}

/**
 * Only this diagnostics channel of Node gives access to the HTTP/2 sessions. grpc-js itself can only ping all
 * connections or none.
 */
const channel = 'http2.server.stream.created';

/**
 * Starts to ping a connection when a stream other than a control stream begins on it. The pings end when a control
 * stream begins or the connection closes. After a call of the returned function, new connections get no pings.
 */
export function pingConnections(pings: Pings): () => void {
  const stops = new WeakMap<object, () => void>();
  const look = (message: unknown): void => {
    // The casts are safe: Node documents this type, and a server's stream belongs to a server's session.
    const { stream, headers } = message as { stream: ServerHttp2Stream; headers: IncomingHttpHeaders };
    const session = stream.session as ServerHttp2Session | undefined;
    if (!session) return;
    // The pings end when a link begins, because it has heartbeats. Pings of 10,000 links would cost 3 % of a core.
    if (headers[':path'] === linkService.Connect.path) stops.get(session)?.();
    else if (!stops.has(session)) stops.set(session, pingUntilClosed(session, pings));
  };
  subscribe(channel, look);
  return () => void unsubscribe(channel, look);
}

function pingUntilClosed(session: ServerHttp2Session, { pingMs, pongMs }: Pings): () => void {
  let cancel = after(pingMs, ping);
  let stopped = false;
  function ping(): void {
    if (session.destroyed) return;
    cancel = after(pongMs, () => session.destroy());
    session.ping((error) => {
      cancel();
      if (error) session.destroy();
      else if (!stopped) cancel = after(pingMs, ping);
    });
  }
  const stop = (): void => {
    stopped = true;
    cancel();
  };
  session.once('close', stop);
  return stop;
}

// HTTP/2 flow-control windows of the gRPC server.
// A larger window makes a distant machine faster but delays other calls.
import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import type { IncomingHttpHeaders, ServerHttp2Session, ServerHttp2Stream } from 'node:http2';
import { windowBytes } from '../../shared/agent-rpcs.ts';

/**
 * Window in bytes for a near machine or a client. A larger window would delay key presses, because Node reads
 * all available data at once.
 */
const nearBytes = 1024 * 1024;
/** Bytes in flight for each millisecond of a distant machine's round trip: 200 MiB/s. */
const bytesPerMs = (200 * 1024 * 1024) / 1000;
/** Number of pings; the shortest round trip counts, because a busy machine answers late. */
const trips = 3;

/** Node's diagnostics channel is the only access to the sessions: grpc-js has no such option for servers. */
const channel = 'http2.server.stream.created';

/** Widens the window of each new session at its first stream. The returned function stops this. */
export function widenWindows(): () => void {
  const widened = new WeakSet<object>();
  const widen = (message: unknown): void => {
    // Node documents this type for the channel's messages. A server's stream belongs to a server's session.
    const { stream, headers } = message as { stream: ServerHttp2Stream; headers: IncomingHttpHeaders };
    const session = stream.session as ServerHttp2Session | undefined;
    if (!session || widened.has(session)) return;
    widened.add(session);
    open(session, nearBytes);
    if (!headers[':path']?.startsWith('/farhand.link.')) return;
    void roundTrip(session).then((ms) => {
      const bytes = Math.min(windowBytes, Math.round(ms * bytesPerMs));
      if (bytes > nearBytes) open(session, bytes);
    });
  };
  subscribe(channel, widen);
  return () => void unsubscribe(channel, widen);
}

function open(session: ServerHttp2Session, bytes: number): void {
  if (session.destroyed) return;
  session.setLocalWindowSize(bytes);
  session.settings({ initialWindowSize: bytes });
}

/** The shortest round trip in milliseconds; 0 for a closed session. */
async function roundTrip(session: ServerHttp2Session): Promise<number> {
  let shortest = Number.POSITIVE_INFINITY;
  for (let trip = 0; trip < trips; trip += 1) shortest = Math.min(shortest, await pinged(session));
  return shortest;
}

function pinged(session: ServerHttp2Session): Promise<number> {
  return new Promise((resolve) => {
    if (session.destroyed) return resolve(0);
    session.ping((error, ms) => resolve(error ? 0 : ms));
  });
}

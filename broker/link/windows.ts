// HTTP/2 flow-control windows of the gRPC server: a larger one makes a far machine faster, and other calls wait longer.
import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import type { IncomingHttpHeaders, ServerHttp2Session, ServerHttp2Stream } from 'node:http2';
import { windowBytes } from '../../shared/rpc.ts';

/** Enough for a near machine, and for a client: Node takes all that is there at once, and a key press waits for it. */
const nearBytes = 1024 * 1024;
/** What a far machine may have under way for each millisecond of its round trip: 200 MiB/s. */
const bytesPerMs = (200 * 1024 * 1024) / 1000;
/** The shortest of so many round trips counts, for a busy machine answers late. */
const trips = 3;

/** grpc-js has no option for it on a server; only Node's own diagnostics channel gives access to its sessions. */
const channel = 'http2.server.stream.created';

/** Widens the windows of every session from its first stream on; the result stops that. */
export function widenWindows(): () => void {
  const widened = new WeakSet<object>();
  const widen = (message: unknown): void => {
    // What Node documents to come on this channel; a server's stream has a server's session.
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

/** Milliseconds; 0 for a session that is over. */
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

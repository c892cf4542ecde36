// HTTP/2 windows of the gRPC server: how much may be under way to us decides how fast a far machine sends.
import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import type { IncomingHttpHeaders, ServerHttp2Session, ServerHttp2Stream } from 'node:http2';
import { windowBytes } from '../../shared/rpc.ts';

/** A client that sends what nobody takes yet fills no more than this. */
const clientWindowBytes = 1024 * 1024;

/** grpc-js has no option for it on a server, and shows its sessions to nobody but Node's own channel. */
const channel = 'http2.server.stream.created';

/** Widens the windows of every session from its first stream on; the result stops that. */
export function widenWindows(): () => void {
  const widened = new WeakSet<ServerHttp2Session>();
  const widen = (message: unknown): void => {
    // What Node documents to come on this channel.
    const { stream, headers } = message as { stream: ServerHttp2Stream; headers: IncomingHttpHeaders };
    const { session } = stream;
    const bytes = headers[':path']?.startsWith('/farhand.link.') ? windowBytes : clientWindowBytes;
    if (!session || session.destroyed || widened.has(session as ServerHttp2Session)) return;
    widened.add(session as ServerHttp2Session);
    session.setLocalWindowSize(bytes);
    session.settings({ initialWindowSize: bytes });
  };
  subscribe(channel, widen);
  return () => void unsubscribe(channel, widen);
}

// HTTP/2 windows of the link's server: how much may be under way to us decides how fast a far machine sends.
import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import type { ServerHttp2Session, ServerHttp2Stream } from 'node:http2';
import { windowBytes } from '../../shared/rpc.ts';

/** grpc-js has no option for it on a server, and shows its sessions to nobody but Node's own channel. */
const channel = 'http2.server.stream.created';

/** Widens the windows of every session from its first stream on; the result stops that. */
export function widenWindows(): () => void {
  const widened = new WeakSet<ServerHttp2Session>();
  const widen = (message: unknown): void => {
    // What Node documents to come on this channel.
    const { session } = (message as { stream: ServerHttp2Stream }).stream;
    if (!session || session.destroyed || widened.has(session as ServerHttp2Session)) return;
    widened.add(session as ServerHttp2Session);
    session.setLocalWindowSize(windowBytes);
    session.settings({ initialWindowSize: windowBytes });
  };
  subscribe(channel, widen);
  return () => void unsubscribe(channel, widen);
}

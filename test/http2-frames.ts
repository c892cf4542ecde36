// Writes and reads single HTTP/2 frames (RFC 9113), for hostile clients: libraries refuse to send such frames.
import { once } from 'node:events';
import { connect, type TLSSocket } from 'node:tls';
import { onTestFinished } from 'vitest';

export const kinds = { data: 0, headers: 1, reset: 3, settings: 4, ping: 6, continuation: 9 };
export const endHeaders = 4;

export function frame(
  kind: number,
  flags: number,
  stream: number,
  payload: Buffer = Buffer.alloc(0),
): Buffer {
  const head = Buffer.alloc(9);
  head.writeUIntBE(payload.length, 0, 3);
  head.writeUInt8(kind, 3);
  head.writeUInt8(flags, 4);
  head.writeUInt32BE(stream, 5);
  return Buffer.concat([head, payload]);
}

/**
 * Encodes header fields as literals without indexing (RFC 7541 section 6.2.2), each shorter than 127 bytes.
 */
export function fields(all: Record<string, string>): Buffer {
  const text = (value: string): Buffer => Buffer.concat([Buffer.of(value.length), Buffer.from(value)]);
  return Buffer.concat(
    Object.entries(all).flatMap(([name, value]) => [Buffer.of(0), text(name), text(value)]),
  );
}

export function callFields(path: string, more: Record<string, string> = {}): Buffer {
  return fields({
    ':method': 'POST',
    ':scheme': 'https',
    ':path': path,
    ':authority': 'broker',
    'content-type': 'application/grpc',
    te: 'trailers',
    ...more,
  });
}

/** Returns the five-byte prefix of a gRPC message with this declared length. */
export function messageHead(length: number, compressed = false): Buffer {
  const head = Buffer.alloc(5);
  head.writeUInt8(compressed ? 1 : 0, 0);
  head.writeUInt32BE(length, 1);
  return head;
}

export interface FrameClient {
  socket: TLSSocket;
  /** Resolves when the frames are written or the connection is closed. */
  send(...frames: Buffer[]): Promise<void>;
  closed: Promise<void>;
}

/** Connects a client and sends its preface and settings. Discards frames of the broker. */
export async function frameClient(address: string): Promise<FrameClient> {
  const [host = '', port = ''] = address.split(':');
  const socket = connect({ host, port: Number(port), rejectUnauthorized: false, ALPNProtocols: ['h2'] });
  onTestFinished(() => void socket.destroy());
  socket.on('error', () => undefined);
  const closed = new Promise<void>((resolve) => socket.once('close', () => resolve()));
  await once(socket, 'secureConnect');
  socket.resume();
  const send = async (...frames: Buffer[]): Promise<void> => {
    if (socket.destroyed || socket.write(Buffer.concat(frames))) return;
    await Promise.race([once(socket, 'drain').catch(() => undefined), closed]);
  };
  await send(Buffer.from('PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'), frame(kinds.settings, 0, 0));
  return { socket, send, closed };
}

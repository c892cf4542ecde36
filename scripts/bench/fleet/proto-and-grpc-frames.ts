// Encodes and decodes the messages of simulated agents: protos, and gRPC frames on an HTTP/2 stream. Apart from the
// protos, it shares no code with the broker.
import { join } from 'node:path';
import protobuf from 'protobufjs';
import type { ConnectResponse__Output } from '../../../proto/types/farhand/link/v1/ConnectResponse.ts';

const folder = join(import.meta.dirname, '../../../proto');
const root = new protobuf.Root();
root.resolvePath = (_from, name) => join(folder, name);
root.loadSync(['farhand/agent/v1/agent.proto', 'farhand/link/v1/link.proto'], { keepCase: true });
root.resolveAll();

const shape = { longs: Number, enums: String, defaults: true, oneofs: true };
const frameHead = 5;

/** Encodes a message. `name` is that of its proto type without the package, such as `Hello`. */
export function encode(name: string, message: object): Buffer {
  const type = root.lookupType(name);
  // The cast is safe: protobufjs writes a Buffer on every platform that has Buffers.
  return type.encode(type.fromObject(message)).finish() as Buffer;
}

/** Decodes a message. T must be the generated type `…__Output` of `name`. */
export function decode<T>(name: string, bytes: Uint8Array): T {
  const type = root.lookupType(name);
  // The cast is safe if T is the generated type of `name`: these types describe messages that are decoded with the
  // options in `shape`.
  return type.toObject(type.decode(bytes), shape) as T;
}

const incoming = root.lookupType('ConnectResponse');

/** Decodes a message that the broker sent on the control stream. */
export function decodeIncoming(bytes: Uint8Array): ConnectResponse__Output {
  return incoming.toObject(incoming.decode(bytes), shape);
}

/** Returns a message as a gRPC frame: a byte for "not compressed", the length, and the bytes of the message. */
export function frame(message: Uint8Array): Buffer {
  const framed = Buffer.allocUnsafe(frameHead + message.length);
  framed[0] = 0;
  framed.writeUInt32BE(message.length, 1);
  framed.set(message, frameHead);
  return framed;
}

/** Splits the bytes of a stream into the messages of its frames. */
export class FrameReader {
  #rest: Buffer = Buffer.alloc(0);

  /** Returns the messages that this chunk completes. */
  push(chunk: Buffer): Buffer[] {
    this.#rest = this.#rest.length === 0 ? chunk : Buffer.concat([this.#rest, chunk]);
    const messages: Buffer[] = [];
    while (this.#rest.length >= frameHead) {
      const end = frameHead + this.#rest.readUInt32BE(1);
      if (this.#rest.length < end) break;
      messages.push(this.#rest.subarray(frameHead, end));
      this.#rest = this.#rest.subarray(end);
    }
    return messages;
  }
}

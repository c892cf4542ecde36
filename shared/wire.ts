// Services of the protos as grpc-js takes them. proto-loader does the same, but has every message describe itself for
// servers that publish their protos: that is 6 MiB of an agent's memory.
import type { MethodDefinition } from '@grpc/grpc-js';
import type { Method, Type } from 'protobufjs';
import { protos } from './protos.ts';

/** How messages look in code; the options of scripts/generate.ts are the same. */
const shape = { longs: Number, enums: String, defaults: true, oneofs: true };

/** One rpc, with the numbers of its messages' fields `chunk` where they have one. */
export interface WireMethod extends MethodDefinition<object, object> {
  requestChunk: number | undefined;
  responseChunk: number | undefined;
}

protos.resolveAll();

/** The rpcs of a service by their names in its proto. */
export function serviceOf(path: string): Record<string, WireMethod> {
  const methods = protos.lookupService(path).methodsArray;
  return Object.fromEntries(methods.map((method) => [method.name, definitionOf(path, method)]));
}

function definitionOf(path: string, method: Method): WireMethod {
  const { name, requestStream = false, responseStream = false } = method;
  const { resolvedRequestType: request, resolvedResponseType: response } = method;
  if (!request || !response) throw new Error(`${path}.${name} speaks of messages that do not exist`);
  return {
    path: `/${path}/${name}`,
    originalName: name.charAt(0).toLowerCase() + name.slice(1),
    requestStream,
    responseStream,
    requestSerialize: encoderOf(request),
    requestDeserialize: decoderOf(request),
    requestChunk: request.fields.chunk?.id,
    responseSerialize: encoderOf(response),
    responseDeserialize: decoderOf(response),
    responseChunk: response.fields.chunk?.id,
  };
}

function encoderOf(type: Type): (message: object) => Buffer {
  // Where there are Buffers, protobufjs writes one.
  return (message) => type.encode(type.fromObject(message)).finish() as Buffer;
}

function decoderOf(type: Type): (bytes: Buffer) => object {
  return (bytes) => type.toObject(type.decode(bytes), shape);
}

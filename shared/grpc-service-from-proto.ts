// Converts services of the protos to the form that grpc-js needs. proto-loader does the same, but takes 6 MiB of an
// agent's memory.
import type { MethodDefinition } from '@grpc/grpc-js';
import type { Method, Type } from 'protobufjs';
import { protos } from './load-protos.ts';

/** How decoded messages represent values. scripts/generate-proto-types.ts generates the types with the same options. */
const shape = { longs: Number, enums: String, defaults: true, oneofs: true };

export interface WireMethod extends MethodDefinition<object, object> {
  /** Number of the field `chunk` in the request; undefined if the request has no such field. */
  requestChunk: number | undefined;
  /** Number of the field `chunk` in the response; undefined if the response has no such field. */
  responseChunk: number | undefined;
}

protos.resolveAll();

/** Returns the rpcs of a service by their names in the proto. `path`: full name of the service. */
export function serviceOf(path: string): Record<string, WireMethod> {
  const methods = protos.lookupService(path).methodsArray;
  return Object.fromEntries(methods.map((method) => [method.name, definitionOf(path, method)]));
}

function definitionOf(path: string, method: Method): WireMethod {
  const { name, requestStream = false, responseStream = false } = method;
  const { resolvedRequestType: request, resolvedResponseType: response } = method;
  if (!request || !response) throw new Error(`${path}.${name} refers to message types that do not exist`);
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
  // The cast is safe: protobufjs writes a Buffer where the platform has Buffers.
  return (message) => type.encode(type.fromObject(message)).finish() as Buffer;
}

function decoderOf(type: Type): (bytes: Buffer) => object {
  return (bytes) => type.toObject(type.decode(bytes), shape);
}

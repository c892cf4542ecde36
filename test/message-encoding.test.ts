// Checks that messages are encoded exactly as by @grpc/proto-loader, a library that other clients use.
import { join } from 'node:path';
import { loadSync, type ServiceDefinition } from '@grpc/proto-loader';
import protobuf from 'protobufjs/light.js';
import { expect, test } from 'vitest';
import { serviceOf } from '../shared/grpc-service-from-proto.ts';
import { protos } from '../shared/load-protos.ts';

const services = ['farhand.agent.v1.Agent', 'farhand.link.v1.Link', 'farhand.client.v1.Streams'];
const files = ['agent/v1/agent', 'link/v1/link', 'client/v1/client'].map((name) => `farhand/${name}.proto`);
const theirs = loadSync(files, {
  includeDirs: [join(import.meta.dirname, '../proto')],
  keepCase: true,
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true,
});

const samples: Record<string, unknown> = {
  string: 'é',
  bytes: Buffer.from([0, 255]),
  bool: true,
  double: 0.5,
};

/** Returns a message with a value in every field. In a oneof, only the last field is set. */
function sampleOf(type: protobuf.Type, depth = 0): Record<string, unknown> {
  const entries = type.fieldsArray.map((field) => {
    const resolved = field.resolve().resolvedType;
    const value =
      resolved instanceof protobuf.Type
        ? depth < 3 && sampleOf(resolved, depth + 1)
        : resolved instanceof protobuf.Enum
          ? Object.keys(resolved.values).at(-1)
          : (samples[field.type] ?? 3_000_000_000 % 2 ** (field.type.includes('64') ? 53 : 31));
    if (field instanceof protobuf.MapField) return [field.name, { key: value }];
    return [field.name, field.repeated ? [value, value] : value];
  });
  return Object.fromEntries(entries.filter(([, value]) => value !== false));
}

test.each(services)('%s is encoded as by proto-loader', (path) => {
  const loaded = theirs[path] as ServiceDefinition;
  const ours = serviceOf(path);
  expect(Object.keys(ours)).toEqual(Object.keys(loaded));
  for (const [name, method] of Object.entries(ours)) {
    const their = loaded[name];
    const { path: at, originalName, requestStream, responseStream } = method;
    expect(their).toMatchObject({ path: at, originalName, requestStream, responseStream });
    const { resolvedRequestType, resolvedResponseType } = protos.lookupService(path).methods[name] ?? {};
    for (const message of [{}, resolvedRequestType ? sampleOf(resolvedRequestType) : {}]) {
      const bytes = method.requestSerialize(message);
      expect(bytes).toEqual(their?.requestSerialize(message));
      expect(method.requestDeserialize(bytes)).toEqual(their?.requestDeserialize(bytes));
    }
    for (const message of [{}, resolvedResponseType ? sampleOf(resolvedResponseType) : {}]) {
      const bytes = method.responseSerialize(message);
      expect(bytes).toEqual(their?.responseSerialize(message));
      expect(method.responseDeserialize(bytes)).toEqual(their?.responseDeserialize(bytes));
    }
  }
});

test('the protos in packages are the same as the files', () => {
  const packed = protobuf.Root.fromJSON(JSON.parse(JSON.stringify(protos.toJSON()))).resolveAll();
  expect(packed.toJSON()).toEqual(protos.toJSON());
  for (const path of services) {
    for (const { name, resolvedRequestType, resolvedResponseType } of protos.lookupService(path)
      .methodsArray) {
      const again = packed.lookupService(path).methods[name];
      const pairs = [
        [resolvedRequestType, again?.resolvedRequestType],
        [resolvedResponseType, again?.resolvedResponseType],
      ];
      for (const [type, twin] of pairs) {
        if (!type || !twin) throw new Error(`${name} lost its messages`);
        const message = sampleOf(type);
        const bytes = type.encode(type.fromObject(message)).finish();
        expect(twin.encode(twin.fromObject(message)).finish()).toEqual(bytes);
        const plain = { defaults: true, oneofs: true, enums: String, longs: Number };
        expect(twin.toObject(twin.decode(bytes), plain)).toEqual(type.toObject(type.decode(bytes), plain));
        expect(twin.toObject(twin.create(), plain)).toEqual(type.toObject(type.create(), plain));
      }
    }
  }
});

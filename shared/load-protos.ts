// Parses the .proto files, in a checkout. The programs in Farhand's packages contain the parsed protos instead of this
// module, to save memory (scripts/package/bundles.ts).
import { join } from 'node:path';
import protobuf from 'protobufjs';
import { home } from './paths-in-checkout-or-package.ts';

const root = new protobuf.Root();
// Finds the file of a name such as farhand/agent/v1/agent.proto. Imports inside the protos use such names too.
root.resolvePath = (_from, name) => join(home, 'proto', name);
root.loadSync(
  ['agent/v1/agent', 'link/v1/link', 'client/v1/client'].map((name) => `farhand/${name}.proto`),
  { keepCase: true },
);

export const protos = root;

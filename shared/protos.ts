// The protos, parsed. Packages hold what this file exports as JSON (scripts/package/bundles.ts): a parser would stay in memory.
import { join } from 'node:path';
import protobuf from 'protobufjs';
import { home } from './install-layout.ts';

const root = new protobuf.Root();
// They import each other by such names, too.
root.resolvePath = (_from, name) => join(home, 'proto', name);
root.loadSync(
  ['agent/v1/agent', 'link/v1/link', 'client/v1/client'].map((name) => `farhand/${name}.proto`),
  { keepCase: true },
);

export const protos = root;

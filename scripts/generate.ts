// Generates the TypeScript types of the wire contract into proto/types (not committed: nothing needs them at run time).
import { execFileSync } from 'node:child_process';
import { rmSync } from 'node:fs';
import { join } from 'node:path';

const root = join(import.meta.dirname, '..');
const target = join(root, 'proto/types');
const options =
  '--keepCase --longs=Number --enums=String --defaults --oneofs --grpcLib=@grpc/grpc-js --targetFileExtension=.ts --importFileExtension=.ts';
const protos = ['agent/v1/agent', 'link/v1/link', 'client/v1/client'].map((name) => `farhand/${name}.proto`);

rmSync(target, { recursive: true, force: true });
execFileSync(
  join(root, 'node_modules/.bin/proto-loader-gen-types'),
  [...options.split(' '), '-I', join(root, 'proto'), '-O', target, ...protos],
  { stdio: 'inherit' },
);

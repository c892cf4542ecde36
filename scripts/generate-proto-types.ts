// Generates the TypeScript types of the protos into proto/types. They are needed for type checks, not to run a program.
import { execFileSync } from 'node:child_process';
import { globSync, mkdtempSync, readFileSync, renameSync, rmSync } from 'node:fs';
import { join } from 'node:path';

const root = join(import.meta.dirname, '..');
const target = join(root, 'proto/types');
const options =
  '--keepCase --longs=Number --enums=String --defaults --oneofs --grpcLib=@grpc/grpc-js --targetFileExtension=.ts --importFileExtension=.ts';
const protos = ['agent/v1/agent', 'link/v1/link', 'client/v1/client'].map((name) => `farhand/${name}.proto`);

const fresh = mkdtempSync(join(root, 'proto/types.new-'));
try {
  execFileSync(
    join(root, 'node_modules/.bin/proto-loader-gen-types'),
    [...options.split(' '), '-I', 'proto', '-O', fresh, ...protos],
    { cwd: root, stdio: 'inherit' },
  );
  // Unchanged files stay, because another process may be reading them.
  if (textIn(fresh) !== textIn(target)) {
    rmSync(target, { recursive: true, force: true });
    renameSync(fresh, target);
  }
} finally {
  rmSync(fresh, { recursive: true, force: true });
}

function textIn(folder: string): string {
  const files = globSync('**/*.ts', { cwd: folder }).sort();
  return files.map((name) => `${name}\n${readFileSync(join(folder, name), 'utf8')}`).join('\n');
}

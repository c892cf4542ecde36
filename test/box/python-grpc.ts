// Generates Python code for gRPC from the protos, for tests that run programs in Python.
import { execFileSync } from 'node:child_process';
import { join } from 'node:path';
import { lacks } from '../skip-without-programs.ts';
import { temporaryFolder } from '../start-farhand.ts';

export const python = '/usr/bin/python3';

/** True if Python lacks one of these modules, or if protoc or its plugin for Python is missing. */
export function lacksPython(...modules: string[]): boolean {
  if (lacks('protoc', 'grpc_python_plugin')) return true;
  try {
    execFileSync(python, ['-c', `import ${modules.join(', ')}`], { stdio: 'ignore' });
    return false;
  } catch {
    return true;
  }
}

/** Generates code from these files of `proto/farhand/`. Returns the temporary folder with the code. */
export function generatePython(...protos: string[]): string {
  const folder = temporaryFolder('python');
  const plugin = execFileSync('sh', ['-c', 'command -v grpc_python_plugin'], { encoding: 'utf8' }).trim();
  const into = [`--python_out=${folder}`, `--grpc_out=${folder}`, `--plugin=protoc-gen-grpc=${plugin}`];
  const files = protos.map((name) => `farhand/${name}`);
  execFileSync('protoc', ['-I', join(import.meta.dirname, '../../proto'), ...into, ...files]);
  return folder;
}

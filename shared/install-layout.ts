// Where our own files lie: in a checkout, or in a package, whose bundled programs lie together in lib/.
import { dirname, join } from 'node:path';

/** Of this file: shared/install-layout.ts in a checkout, some bundle in a package. */
const here = import.meta.filename;
const packaged = here.endsWith('.js');

/** Holds package.json and proto/, in both. */
export const home = dirname(import.meta.dirname);

/** The file of a program, for who starts it as a process of its own. */
export const brokerProgram = join(home, packaged ? 'lib/farhand-broker.js' : 'broker/main.ts');
export const spawnerProgram = join(
  home,
  packaged ? 'lib/farhand-spawner.js' : 'agent/processes/spawner/main.ts',
);

/** Where Node stores the JavaScript of a checkout's TypeScript; without it each process keeps what stripped the types, 16 MiB. */
export const compileCache = packaged ? undefined : join(home, 'node_modules/.cache/node');

/** A directory that a package has, and a checkout somewhere else. */
export function shipped(name: string, otherwise: () => string): string {
  return packaged ? join(home, name) : otherwise();
}

// Finds Farhand's own files, in a checkout or in a package. In a package, the bundled programs are in lib/.
import { dirname, join } from 'node:path';

/** Path of this module: shared/paths-in-checkout-or-package.ts in a checkout, a bundled program in a package. */
const here = import.meta.filename;
export const packaged = here.endsWith('.js');

/** Root directory of the checkout or package, with package.json and proto/. */
export const home = dirname(import.meta.dirname);

/** Paths of the programs that are started as separate processes or threads. */
export const brokerProgram = join(home, packaged ? 'lib/farhand-broker.js' : 'broker/main.ts');
export const historyReaderProgram = join(
  home,
  packaged ? 'lib/farhand-history-reader.js' : 'broker/history/sqlite-read-thread.ts',
);
export const spawnerProgram = join(
  home,
  packaged ? 'lib/farhand-spawner.js' : 'agent/processes/spawner/main.ts',
);

/**
 * Directory of Node's compile cache, for checkouts. Without the cache each process loads Node's TypeScript stripper,
 * which takes 16 MiB.
 */
export const compileCache = packaged ? undefined : join(home, 'node_modules/.cache/node');

/** Path of a file: `name` in the root of a package, or the result of `otherwise` in a checkout. */
export function shipped(name: string, otherwise: () => string): string {
  return packaged ? join(home, name) : otherwise();
}

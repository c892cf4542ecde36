// Bundles programs for tests and measurements into DIR/lib.
// Usage: node scripts/bundle-programs.ts DIR [PROGRAM... | sdk]
import { cpSync } from 'node:fs';
import { join } from 'node:path';
import { bundleLibrary, bundlePrograms, type Entry } from './package/bundles.ts';

const [folder, ...names] = process.argv.slice(2);
if (!folder) throw new Error('usage: node scripts/bundle-programs.ts DIR [PROGRAM... | sdk]');
const known: Entry[] = ['farhand', 'farhand-agent', 'farhand-broker'];
if (names.includes('sdk')) await bundleLibrary(folder);
else {
  const wanted = known.filter((name) => (names.length > 0 ? names.includes(name) : name === 'farhand'));
  await bundlePrograms(wanted, folder);
}
cpSync(join(import.meta.dirname, '../package.json'), join(folder, 'package.json'));

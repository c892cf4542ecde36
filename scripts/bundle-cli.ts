// Bundles programs into DIR/lib, for tests and benchmarks: node scripts/bundle-cli.ts DIR [PROGRAM...].
import { cpSync } from 'node:fs';
import { join } from 'node:path';
import { bundlePrograms, type Entry } from './package/bundles.ts';

const [folder, ...names] = process.argv.slice(2);
if (!folder) throw new Error('usage: node scripts/bundle-cli.ts DIR [PROGRAM...]');
const known: Entry[] = ['farhand', 'farhand-agent', 'farhand-broker'];
await bundlePrograms(
  known.filter((name) => (names.length > 0 ? names.includes(name) : name === 'farhand')),
  folder,
);
cpSync(join(import.meta.dirname, '../package.json'), join(folder, 'package.json'));

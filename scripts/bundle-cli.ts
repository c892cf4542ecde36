// `farhand` alone as a bundle, for tests and measurements: node scripts/bundle-cli.ts DIR makes DIR/lib/farhand.js.
import { cpSync } from 'node:fs';
import { join } from 'node:path';
import { bundlePrograms } from './package/bundles.ts';

const [folder] = process.argv.slice(2);
if (!folder) throw new Error('say where to: node scripts/bundle-cli.ts DIR');
await bundlePrograms(['farhand'], folder);
cpSync(join(import.meta.dirname, '../package.json'), join(folder, 'package.json'));

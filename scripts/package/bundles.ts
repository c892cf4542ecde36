// The programs and the library as bundles: lib/ of a package, with what they read at run time beside it.
import { cpSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { build, type Metafile, type Plugin } from 'esbuild';
import { root } from './ground.ts';

const require = createRequire(import.meta.url);

/** Each becomes lib/NAME.js. */
const entries = {
  'farhand-agent': 'agent/main.ts',
  'farhand-broker': 'broker/main.ts',
  farhand: 'broker/cli/main.ts',
  sdk: 'shared/sdk/index.ts',
  grpc: 'shared/grpc.ts',
};
export type Entry = keyof typeof entries;

/** CommonJS libraries look for their protos at `../../proto` of themselves: that becomes proto/ beside lib/. */
const banner = `import { createRequire as requireFrom } from 'node:module';
const require = requireFrom(import.meta.url), __dirname = import.meta.dirname + '/src', __filename = import.meta.filename;`;

/** Our texts are English; zod's other fifty languages would be a third of the agent. */
const oneLanguage: Plugin = {
  name: 'one language',
  setup(esbuild) {
    esbuild.onLoad({ filter: /\/zod\/v4\/locales\/index\.js$/ }, () => ({
      contents: "export { default as en } from './en.js';",
    }));
  },
};

/** Fills `package`/lib and what goes with it. Answers the directories of the libraries inside. */
export async function bundle(names: Entry[], folder: string): Promise<string[]> {
  const { metafile } = await build({
    absWorkingDir: root,
    entryPoints: Object.fromEntries(names.map((name) => [name, entries[name]])),
    outdir: join(folder, 'lib'),
    chunkNames: 'part-[hash]',
    bundle: true,
    splitting: true,
    platform: 'node',
    format: 'esm',
    target: 'node22',
    minifySyntax: true,
    legalComments: 'none',
    metafile: true,
    banner: { js: banner },
    plugins: [oneLanguage],
    logLevel: 'warning',
  });
  addProtos(folder, names);
  if (names.includes('farhand-broker')) addReferencePage(folder);
  const libraries = librariesOf(metafile);
  writeFileSync(join(folder, 'THIRD-PARTY.txt'), licencesOf(libraries));
  cpSync(join(root, 'LICENSE'), join(folder, 'LICENSE'));
  return libraries;
}

function addProtos(folder: string, names: Entry[]): void {
  cpSync(join(root, 'proto/farhand'), join(folder, 'proto/farhand'), { recursive: true });
  if (!names.includes('farhand-broker')) return;
  const health = dirname(require.resolve('grpc-health-check/package.json'));
  cpSync(join(health, 'proto'), join(folder, 'proto'), { recursive: true });
}

function addReferencePage(folder: string): void {
  const library = dirname(require.resolve('swagger-ui-dist/package.json'));
  mkdirSync(join(folder, 'docs'));
  for (const file of ['swagger-ui-bundle.js', 'swagger-ui.css']) {
    cpSync(join(library, file), join(folder, 'docs', file));
  }
}

function librariesOf({ inputs }: Metafile): string[] {
  const found = Object.keys(inputs).flatMap((file) => /^(.*node_modules\/(?:@[^/]+\/)?[^/]+)\//.exec(file)?.[1] ?? []);
  return [...new Set([...found, 'node_modules/swagger-ui-dist'])].sort();
}

function licencesOf(libraries: string[]): string {
  const texts = libraries.map((library) => {
    const { name, version, license } = JSON.parse(readFileSync(join(root, library, 'package.json'), 'utf8'));
    const file = readdirSync(join(root, library)).find((entry) => /^licen[cs]e/i.test(entry));
    const text = file ? readFileSync(join(root, library, file), 'utf8').trim() : '';
    return `${name} ${version} (${license})\n\n${text}\n`;
  });
  return `Farhand contains these libraries.\n\n${texts.join(`\n${'-'.repeat(72)}\n\n`)}`;
}

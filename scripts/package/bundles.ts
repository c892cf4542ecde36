// The programs and the library as bundles: lib/ of a package, with what they read at run time beside it.
import { cpSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { type BuildOptions, build, type Metafile, type Plugin } from 'esbuild';
import { protos } from '../../shared/protos.ts';
import { manifestSchema, readJson, root } from './ground.ts';
import { routesAsData, terminalsLater } from './routes.ts';

const require = createRequire(import.meta.url);

/** Each becomes lib/NAME.js. */
const entries = {
  'farhand-agent': 'agent/main.ts',
  'farhand-broker': 'broker/main.ts',
  farhand: 'broker/cli/main.ts',
};
export type Entry = keyof typeof entries;
/** What an agent runs as a process of its own. */
const spawner = { 'farhand-spawner': 'agent/processes/spawner/main.ts' };

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

/** The parser of protos, which a program needs once, stays out of it with all that it would leave in memory. */
const protosParsed: Plugin = {
  name: 'protos parsed',
  setup(esbuild) {
    esbuild.onLoad({ filter: /\/shared\/protos\.ts$/ }, ({ path }) => ({
      resolveDir: dirname(path),
      contents: `import protobuf from 'protobufjs/light.js';
        export const protos = protobuf.Root.fromJSON(${JSON.stringify(protos.toJSON())});`,
    }));
  },
};

/** Errors of the SDK are those of the gRPC client: it uses the SDK's own file. */
const sdkBeside: Plugin = {
  name: 'the SDK beside',
  setup(esbuild) {
    esbuild.onResolve({ filter: /\/sdk\/index\.ts$/ }, () => ({ path: './sdk.js', external: true }));
  },
};

const shape: BuildOptions = {
  absWorkingDir: root,
  bundle: true,
  format: 'esm',
  target: 'node22',
  // Half of what V8 keeps of the text; names and short lines stay, for readers of a stack.
  minifySyntax: true,
  minifyWhitespace: true,
  lineLimit: 120,
  legalComments: 'none',
  plugins: [oneLanguage, protosParsed, routesAsData],
  logLevel: 'warning',
};

/** Fills lib/ of a package with programs, and puts beside it what they read. */
export async function bundlePrograms(names: readonly Entry[], folder: string): Promise<void> {
  const { metafile } = await build({
    ...shape,
    plugins: [oneLanguage, routesAsData, terminalsLater],
    entryPoints: {
      ...Object.fromEntries(names.map((name) => [name, entries[name]])),
      ...(names.includes('farhand-agent') && spawner),
    },
    outdir: join(folder, 'lib'),
    chunkNames: 'part-[hash]',
    splitting: true,
    platform: 'node',
    // grpc-js asks for it where a server reports its channels; only the broker's health check has use for it.
    external: names.includes('farhand-broker') ? [] : ['@grpc/proto-loader'],
    banner: { js: banner },
    metafile: true,
  });
  addProtos(folder, names);
  addUnits(folder, names);
  if (names.includes('farhand-broker')) addBrokerFiles(folder);
  writeFileSync(join(folder, 'THIRD-PARTY.txt'), licencesOf(librariesOf(metafile)));
  cpSync(join(root, 'LICENSE'), join(folder, 'LICENSE'));
}

/** `farhand` and `farhand/grpc`, for programs of other people; the first one runs in a browser too. */
export async function bundleLibrary(folder: string): Promise<void> {
  const outdir = join(folder, 'lib');
  const sdk = { sdk: 'shared/sdk/index.ts' };
  await build({ ...shape, entryPoints: sdk, outdir, platform: 'neutral' });
  const grpc = { grpc: 'shared/grpc.ts' };
  const plugins = [oneLanguage, protosParsed, routesAsData, sdkBeside];
  await build({ ...shape, plugins, entryPoints: grpc, outdir, platform: 'node', banner: { js: banner } });
}

/**
 * bin/NAME.js for whatever Node a user has: one that is too old gets an error that says so before it meets what it cannot load. Has
 * only words that Node 12 knows.
 */
export async function bundleDoors(names: readonly Entry[], folder: string): Promise<void> {
  for (const name of names) {
    const contents = `import { nodeIsGood, wrongNode } from './shared/program.ts';
if (nodeIsGood(process.version)) void import('../lib/${name}.js');
else {
  console.error('${name}: ' + wrongNode);
  process.exitCode = 1;
}`;
    await build({
      ...shape,
      stdin: { contents, resolveDir: root },
      target: 'node12.20',
      external: ['../lib/*'],
      platform: 'node',
      banner: { js: '#!/usr/bin/env node' },
      outfile: join(folder, 'bin', `${name}.js`),
    });
  }
}

function addProtos(folder: string, names: readonly Entry[]): void {
  cpSync(join(root, 'proto/farhand'), join(folder, 'proto/farhand'), { recursive: true });
  if (!names.includes('farhand-broker')) return;
  const health = dirname(require.resolve('grpc-health-check/package.json'));
  cpSync(join(health, 'proto'), join(folder, 'proto'), { recursive: true });
}

function addUnits(folder: string, names: readonly Entry[]): void {
  for (const program of ['agent', 'broker'] as const) {
    const unit = `farhand-${program}.service`;
    if (names.includes(`farhand-${program}`)) cpSync(join(root, program, unit), join(folder, unit));
  }
}

function addBrokerFiles(folder: string): void {
  cpSync(join(root, 'broker/packages/install.sh'), join(folder, 'install.sh'));
  cpSync(join(root, 'broker/http/reference.md'), join(folder, 'docs/reference.md'));
  const redocly = dirname(require.resolve('@redocly/cli/package.json'));
  const renderer = 'redoc.standalone.js';
  cpSync(join(redocly, 'lib/chunks', renderer), join(folder, 'docs', renderer));
}

function librariesOf({ inputs }: Metafile): string[] {
  const found = Object.keys(inputs).flatMap(
    (file) => /^(.*node_modules\/(?:@[^/]+\/)?[^/]+)\//.exec(file)?.[1] ?? [],
  );
  return [...new Set([...found, 'node_modules/@redocly/cli'])].sort();
}

function licencesOf(libraries: string[]): string {
  const texts = libraries.map((library) => {
    const { name, version, license } = readJson(join(root, library, 'package.json'), manifestSchema);
    const file = readdirSync(join(root, library)).find((entry) => /^licen[cs]e/i.test(entry));
    const text = file ? readFileSync(join(root, library, file), 'utf8').trim() : '';
    return `${name} ${version} (${license})\n\n${text}\n`;
  });
  return `Farhand contains these libraries.\n\n${texts.join(`\n${'-'.repeat(72)}\n\n`)}`;
}

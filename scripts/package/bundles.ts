// Bundles the programs and the SDK into lib/ of a package, and copies the files that they read at run time.
import { cpSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { type BuildOptions, build, type Metafile, type Plugin } from 'esbuild';
import { protos } from '../../shared/load-protos.ts';
import { buildConsole } from '../build-console.ts';
import { routesAsData } from './routes-as-plain-data.ts';
import { manifestSchema, readJson, root } from './shared-by-packaging-steps.ts';

const require = createRequire(import.meta.url);

/** The source file of each program. Its bundle is lib/NAME.js. */
const entries = {
  'farhand-agent': 'agent/main.ts',
  'farhand-broker': 'broker/main.ts',
  farhand: 'broker/cli/main.ts',
};
export type Entry = keyof typeof entries;
/** Programs that the agent or the broker runs as a separate process or thread. */
const spawner = { 'farhand-spawner': 'agent/processes/spawner/main.ts' };
const historyReader = { 'farhand-history-reader': 'broker/history/sqlite-read-thread.ts' };

/**
 * Defines require, __dirname and __filename for CommonJS libraries in the bundle. The gRPC libraries load protos from
 * `__dirname/../../proto`. Because of the added `/src`, this is the directory proto/ beside lib/.
 */
const banner = `import { createRequire as requireFrom } from 'node:module';
const require = requireFrom(import.meta.url), __dirname = import.meta.dirname + '/src', __filename = import.meta.filename;`;

/** Leaves out zod's error texts in languages other than English. They would be a third of the agent's code. */
const oneLanguage: Plugin = {
  name: 'one language',
  setup(esbuild) {
    esbuild.onLoad({ filter: /\/zod\/v4\/locales\/index\.js$/ }, () => ({
      contents: "export { default as en } from './en.js';",
    }));
  },
};

/**
 * Puts the protos into the bundle as JSON. Otherwise each program would need a parser of .proto files, which would stay
 * in its memory.
 */
const protosParsed: Plugin = {
  name: 'protos parsed',
  setup(esbuild) {
    esbuild.onLoad({ filter: /\/shared\/load-protos\.ts$/ }, ({ path }) => ({
      resolveDir: dirname(path),
      contents: `import protobuf from 'protobufjs/light.js';
        export const protos = protobuf.Root.fromJSON(${JSON.stringify(protos.toJSON())});`,
    }));
  },
};

/**
 * Makes the gRPC client import sdk.js instead of containing a copy of the SDK. A copy would define a second class
 * FarhandError.
 */
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
  // Shorter syntax and fewer spaces halve the source text that V8 keeps in memory. Names and line breaks stay, because
  // stack traces print them.
  minifySyntax: true,
  minifyWhitespace: true,
  lineLimit: 120,
  legalComments: 'none',
  plugins: [oneLanguage, protosParsed, routesAsData],
  logLevel: 'warning',
};

/** Bundles programs into lib/ of a package, and copies the files that they read. */
export async function bundlePrograms(names: readonly Entry[], folder: string): Promise<void> {
  const { metafile } = await build({
    ...shape,
    entryPoints: {
      ...Object.fromEntries(names.map((name) => [name, entries[name]])),
      ...(names.includes('farhand-agent') && spawner),
      ...(names.includes('farhand-broker') && historyReader),
    },
    outdir: join(folder, 'lib'),
    chunkNames: 'part-[hash]',
    splitting: true,
    platform: 'node',
    // Only the bundle of the broker contains @grpc/proto-loader, for its health check. grpc-js imports it too, but only
    // for features that Farhand does not use (channelz and ORCA).
    external: names.includes('farhand-broker') ? [] : ['@grpc/proto-loader'],
    banner: { js: banner },
    metafile: true,
  });
  addProtos(folder, names);
  addUnits(folder, names);
  const inputs = [metafile];
  if (names.includes('farhand-broker')) {
    addBrokerFiles(folder);
    inputs.push(await buildConsole(join(folder, 'console')));
  }
  writeFileSync(join(folder, 'THIRD-PARTY.txt'), licencesOf(librariesOf(inputs)));
  cpSync(join(root, 'LICENSE'), join(folder, 'LICENSE'));
}

/** Bundles `farhand` and `farhand/grpc` for use as libraries. `farhand` also runs in browsers. */
export async function bundleLibrary(folder: string): Promise<void> {
  const outdir = join(folder, 'lib');
  const sdk = { sdk: 'shared/sdk/index.ts' };
  await build({ ...shape, entryPoints: sdk, outdir, platform: 'neutral' });
  const grpc = { grpc: 'shared/grpc-api-client.ts' };
  const plugins = [oneLanguage, protosParsed, routesAsData, sdkBeside];
  await build({ ...shape, plugins, entryPoints: grpc, outdir, platform: 'node', banner: { js: banner } });
}

/** Writes bin/NAME.js, which runs a program with the user's own Node, or prints that this Node is too old. */
export async function bundleDoors(names: readonly Entry[], folder: string): Promise<void> {
  for (const name of names) {
    const contents = `import { nodeIsGood, wrongNode } from './shared/program-start-and-end.ts';
if (nodeIsGood(process.version)) void import('../lib/${name}.js');
else {
  console.error('${name}: ' + wrongNode);
  process.exitCode = 1;
}`;
    await build({
      ...shape,
      stdin: { contents, resolveDir: root },
      // Even a Node that is too old for lib/ must be able to parse bin/NAME.js.
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
  if (!names.includes('farhand-agent')) return;
  for (const unit of ['farhand-agent-upgrade.service', 'farhand-agent-upgrade.path'])
    cpSync(join(root, 'agent', unit), join(folder, unit));
}

function addBrokerFiles(folder: string): void {
  cpSync(join(root, 'broker/agent-packages/install.sh'), join(folder, 'install.sh'));
  cpSync(join(root, 'broker/http/reference.md'), join(folder, 'docs/reference.md'));
  const redocly = dirname(require.resolve('@redocly/cli/package.json'));
  const renderer = 'redoc.standalone.js';
  cpSync(join(redocly, 'lib/chunks', renderer), join(folder, 'docs', renderer));
}

function librariesOf(builds: readonly Metafile[]): string[] {
  const files = builds.flatMap(({ inputs }) => Object.keys(inputs));
  const found = files.flatMap((file) => /^(.*node_modules\/(?:@[^/]+\/)?[^/]+)\//.exec(file)?.[1] ?? []);
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

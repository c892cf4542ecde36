// Creates the npm package farhand: the SDK with its types, and all three programs, which run with the user's own Node.
import { cpSync, mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { publint } from 'publint';
import { formatMessage } from 'publint/utils';
import { addShare } from '../man-pages-and-completions.ts';
import { bundleDoors, bundleLibrary, bundlePrograms, type Entry } from './bundles.ts';
import { manifestSchema, readJson, root, run, version } from './shared-by-packaging-steps.ts';
import { declare } from './type-declarations.ts';

const programs: Entry[] = ['farhand', 'farhand-agent', 'farhand-broker'];

/** Creates the npm package. Returns the path of the tarball. */
export async function makeNpm(scratch: string, dist: string): Promise<string> {
  const folder = join(scratch, 'farhand');
  mkdirSync(folder, { recursive: true });
  await bundlePrograms(programs, folder);
  await bundleDoors(programs, folder);
  await bundleLibrary(folder);
  await declare(folder, scratch);
  cpSync(join(root, 'README.md'), join(folder, 'README.md'));
  for (const name of ['CHANGELOG.md', 'SECURITY.md', 'docs']) {
    cpSync(join(root, name), join(folder, name), { recursive: true });
  }
  const pages = await addShare(join(folder, 'share'), programs);
  writeFileSync(join(folder, 'package.json'), manifest(pages));
  await run('npm', ['pack', '--ignore-scripts', '--pack-destination', dist], folder);
  const tarball = join(dist, `farhand-${version}.tgz`);
  await check(folder, tarball);
  return tarball;
}

function manifest(pages: readonly string[]): string {
  const { name, description, license, engines, optionalDependencies } = readJson(
    join(root, 'package.json'),
    manifestSchema,
  );
  // Only optional dependencies with a scope (`@…`) are native addons. Those without a scope contain Node itself, which
  // users of npm already have.
  const addons = Object.entries(optionalDependencies).filter(([library]) => library.startsWith('@'));
  const entry = (types: string, file: string) => ({
    types: `./types/shared/${types}.d.ts`,
    default: `./lib/${file}.js`,
  });
  const made = {
    ...{ name, version, description, license, type: 'module', engines },
    bin: Object.fromEntries(programs.map((program) => [program, `bin/${program}.js`])),
    man: pages.map((page) => `./share/${page}`),
    exports: {
      '.': entry('sdk/index', 'sdk'),
      './grpc': entry('grpc-api-client', 'grpc'),
      './package.json': './package.json',
    },
    sideEffects: false,
    optionalDependencies: Object.fromEntries(addons),
  };
  return `${JSON.stringify(made, undefined, 2)}\n`;
}

/** Throws if publint or arethetypeswrong (attw) finds a fault in the package. */
async function check(folder: string, tarball: string): Promise<void> {
  const { messages, pkg } = await publint({ pkgDir: folder, strict: true, pack: false });
  if (messages.length > 0) {
    throw new Error(
      messages.map((one) => `publint: ${formatMessage(one, pkg, { color: false })}`).join('\n'),
    );
  }
  const attw = join(root, 'node_modules/.bin/attw');
  await run(attw, ['--profile', 'esm-only', '--no-emoji', '--no-color', tarball]);
}

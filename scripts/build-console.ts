// Builds the console for browsers: index.html, and scripts and styles with hashed names, each also compressed.
// Usage: node scripts/build-console.ts [DIRECTORY]; the default is generated/console.
import {
  chmodSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { basename, dirname, join, relative } from 'node:path';
import { brotliCompressSync, constants, gzipSync } from 'node:zlib';
import { build, type Metafile, type Plugin } from 'esbuild';
import { routesAsData } from './package/routes-as-plain-data.ts';

const root = join(import.meta.dirname, '..');
const source = join(root, 'broker/console');
export const consoleFolder = join(root, 'generated/console');

/**
 * Loads each icon of lucide-static as a list of its elements, because the page's Content-Security-Policy forbids
 * parsing markup.
 */
const icons: Plugin = {
  name: 'icons',
  setup(esbuild) {
    esbuild.onLoad({ filter: /\/lucide-static\/icons\/[\w-]+\.svg$/ }, ({ path }) => {
      const elements = [...readFileSync(path, 'utf8').matchAll(/^ {2}<(\w+) (.*?) \/>$/gm)];
      const nodes = elements.map(
        ([, name, attributes = '']): [string | undefined, Record<string, string>] => {
          const pairs = [...attributes.matchAll(/([\w-]+)="([^"]*)"/g)];
          return [
            name,
            Object.fromEntries(pairs.map(([, key = '', value = '']): [string, string] => [key, value])),
          ];
        },
      );
      return { contents: `export default ${JSON.stringify(nodes)}`, loader: 'js' };
    });
  },
};

/**
 * Wraps code, so that it runs once at the end of the browser's current task, even if the wrapped code is reached many
 * times in this task.
 */
const onceATask = (once: string): string => `{this._soon||=!queueMicrotask(()=>{this._soon=!1;${once}})}`;

const scrolled = 'this._onScroll.fire({position:this._bufferService.buffer.ydisp})';

/** Changes to the code of xterm.js, as pairs of the old text and the new text. */
const emulatorChanges: readonly (readonly [was: string, is: string])[] = [
  // xterm.js sets colours in a style attribute, which the console's Content-Security-Policy forbids. The new code sets
  // them in the element's `style` object.
  [
    // biome-ignore lint/suspicious/noTemplateCurlyInString: it is code
    't.setAttribute("style",`${t.getAttribute("style")||""}${e};`)',
    // biome-ignore lint/suspicious/noTemplateCurlyInString: it is code
    't.style.cssText+=`${e};`',
  ],
  // xterm.js updates its scroll bar for each printed line. The new code updates it once in each task of the browser,
  // which halves the time to print many short lines.
  [
    `this._bufferService.onScroll(()=>{${scrolled},`,
    `this._bufferService.onScroll(()=>{(()=>${onceATask(scrolled)})(),`,
  ],
  [
    'this._bufferService.onScroll(()=>this._sync())',
    `this._bufferService.onScroll(()=>${onceATask('this._sync()')})`,
  ],
];

const changedEmulator: Plugin = {
  name: 'changed emulator',
  setup(esbuild) {
    esbuild.onLoad({ filter: /\/@xterm\/xterm\/lib\/xterm\.mjs$/ }, ({ path }) => {
      let contents = readFileSync(path, 'utf8');
      for (const [was, is] of emulatorChanges) {
        if (!contents.includes(was))
          throw new Error(`${path} does not contain the code to change; adapt emulatorChanges: ${was}`);
        contents = contents.replaceAll(was, is);
      }
      return { contents };
    });
  },
};

const main = join(source, 'main.tsx');

/**
 * Adds an import of the main script to each script that is loaded later. Otherwise esbuild would move the code that
 * they share into further files, which the first page would have to load.
 */
function partsImportMain(): Plugin {
  const parts = new Set<string>();
  return {
    name: 'parts import main',
    setup(esbuild) {
      esbuild.onResolve({ filter: /^\.{1,2}\// }, ({ kind, path, resolveDir }) => {
        if (kind === 'dynamic-import') parts.add(join(resolveDir, path));
        return undefined;
      });
      esbuild.onLoad({ filter: /\/broker\/console\/.*\.tsx?$/ }, ({ path }) => {
        if (!parts.has(path)) return undefined;
        const contents = `${readFileSync(path, 'utf8')}\nimport ${JSON.stringify(main)};`;
        return { contents, loader: path.endsWith('x') ? 'tsx' : 'ts' };
      });
    },
  };
}

/** Builds the console into a directory, whose old content is replaced. `fast` leaves out the slow compression. */
export async function buildConsole(target = consoleFolder, { fast = false } = {}): Promise<Metafile> {
  mkdirSync(dirname(target), { recursive: true });
  const fresh = mkdtempSync(`${target}.new-`);
  try {
    // mkdtemp creates a private directory, but the Linux user of an installed broker must be able to read it.
    chmodSync(fresh, 0o755);
    const { metafile } = await build({
      absWorkingDir: root,
      entryPoints: { main, style: join(source, 'style/index.css') },
      outdir: join(fresh, 'assets'),
      entryNames: '[name]-[hash]',
      chunkNames: '[name]-[hash]',
      bundle: true,
      splitting: true,
      format: 'esm',
      target: ['chrome120', 'firefox121', 'safari17'],
      platform: 'browser',
      jsx: 'automatic',
      jsxImportSource: 'preact',
      minify: true,
      legalComments: 'none',
      plugins: [routesAsData, icons, changedEmulator, partsImportMain()],
      metafile: true,
      logLevel: 'warning',
    });
    const page = readFileSync(join(source, 'index.html'), 'utf8');
    writeFileSync(join(fresh, 'index.html'), withAssets(page, metafile));
    compress(join(fresh, 'assets'), fast);
    rmSync(target, { recursive: true, force: true });
    renameSync(fresh, target);
    return metafile;
  } finally {
    rmSync(fresh, { recursive: true, force: true });
  }
}

/** Inserts the hashed names of the script and the style into the page. */
function withAssets(page: string, { outputs }: Metafile): string {
  const containing = (file: string): string => {
    const found = Object.entries(outputs).find(([, { inputs }]) =>
      Object.hasOwn(inputs, relative(root, file)),
    );
    if (found === undefined) throw new Error(`no output contains ${file}`);
    return basename(found[0]);
  };
  const script = containing(main);
  const style = containing(join(source, 'style/index.css'));
  return page.replace('__MAIN__', script).replace('__STYLE__', style);
}

/** Writes NAME.br and NAME.gz beside each file, so that the broker need not compress them. */
function compress(folder: string, fast: boolean): void {
  for (const name of readdirSync(folder)) {
    const bytes = readFileSync(join(folder, name));
    const quality = { [constants.BROTLI_PARAM_QUALITY]: fast ? 4 : 11 };
    writeFileSync(join(folder, `${name}.br`), brotliCompressSync(bytes, { params: quality }));
    writeFileSync(join(folder, `${name}.gz`), gzipSync(bytes, { level: fast ? 6 : 9 }));
  }
}

if (process.argv[1] === import.meta.filename) await buildConsole(process.argv[2]);

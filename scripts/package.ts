// Makes the packages in dist/: `npm run package [-- --arch x64] [--only npm,tar,deb] [--to DIR]`.
import { linkSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { basename, join, resolve } from 'node:path';
import { parseArgs } from 'node:util';
import { debName, makeDeb } from './package/debian-package.ts';
import { makeNpm } from './package/npm-package.ts';
import { addPackages, makeProgram, type Program } from './package/program-directories.ts';
import { archive, sha256Of } from './package/reproducible-tar.ts';
import { type Arch, arches, root, run, version } from './package/run-and-read-json.ts';

const { values } = parseArgs({
  options: {
    arch: { type: 'string' },
    only: { type: 'string', default: 'npm,tar,deb' },
    to: { type: 'string', default: join(root, 'dist') },
    /** True to compress less, for tests: larger packages in a third of the time. */
    fast: { type: 'boolean', default: false },
  },
});
const dist = resolve(values.to);
const wanted = arches.filter((arch) => values.arch === undefined || values.arch === arch);
const kinds = values.only.split(',');
const level = values.fast ? 1 : 6;
const packages = join(dist, 'packages');

async function main(): Promise<void> {
  if (wanted.length === 0) throw new Error(`--arch must be one of ${arches.join(', ')}`);
  mkdirSync(dist, { recursive: true });
  const scratch = mkdtempSync(join(dist, '.making-'));
  try {
    if (kinds.includes('npm')) {
      // The types of the npm package refer to the generated types of the protos, which a fresh clone lacks.
      await run(process.execPath, ['scripts/generate-proto-types.ts']);
      printFile(await makeNpm(scratch, dist));
    }
    if (kinds.includes('tar') || kinds.includes('deb')) await makePrograms(scratch);
  } finally {
    rmSync(scratch, { recursive: true, force: true });
  }
}

/** Makes the agents before the brokers, because brokers contain the agents' packages. */
async function makePrograms(scratch: string): Promise<void> {
  const agents: string[] = [];
  for (const arch of wanted) agents.push(await make('farhand-agent', arch, scratch));
  rmSync(packages, { recursive: true, force: true });
  mkdirSync(packages);
  const sums: string[] = [];
  for (const file of agents.sort()) {
    linkSync(file, join(packages, basename(file)));
    sums.push(`${await sha256Of(file)}  ${basename(file)}\n`);
  }
  writeFileSync(join(packages, 'SHA256SUMS'), sums.join(''));
  for (const arch of wanted) await make('farhand-broker', arch, scratch);
}

/** Makes a program's packages. Returns the path of the tar.gz, which is made for an agent in any case. */
async function make(name: Program, arch: Arch, scratch: string): Promise<string> {
  const program = join(scratch, `${name}-${version}-linux-${arch}`);
  await makeProgram(name, arch, program);
  if (name === 'farhand-broker') addPackages(program, packages);
  const file = join(dist, `${basename(program)}.tar.gz`);
  if (kinds.includes('tar') || name === 'farhand-agent') {
    rmSync(file, { force: true });
    await archive(program, file, level);
    printFile(file);
  }
  if (kinds.includes('deb')) {
    const deb = join(dist, debName(name, arch));
    await makeDeb(name, arch, { program, scratch: join(scratch, `${name}-${arch}-deb`), file: deb, level });
    printFile(deb);
  }
  return file;
}

function printFile(file: string): void {
  process.stdout.write(`${file}\n`);
}

await main();

// Creates the packages in dist/, and the keys that sign them. `npm run package -- --help` prints the flags.
import { cpSync, linkSync, mkdirSync, mkdtempSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { basename, join, resolve } from 'node:path';
import { parseArgs } from 'node:util';
import { type SignedPackage, signatureFileOf } from '../shared/agent-package-signature.ts';
import { StartError } from '../shared/errors.ts';
import { reasonOf } from '../shared/system-error-messages.ts';
import { debName, makeDeb } from './package/debian-package.ts';
import { makeNpm } from './package/npm-package.ts';
import { makeProgram, type Program } from './package/program-directories.ts';
import { archive, sha256Of } from './package/reproducible-tar.ts';
import { type Arch, arches, root, run, StepFailed, version } from './package/shared-by-packaging-steps.ts';
import { loadSigningKey, makeSigningKey, type Signer } from './package/signing-key.ts';

const help = `Usage: npm run package -- [flags]

  --arch ARCH        only packages for x64 or arm64 (default: both)
  --only KINDS       only these kinds, comma-separated (default: npm,tar,deb)
  --to DIR           directory of the packages (default: dist)
  --fast             compress less: larger packages in a third of the time
  --sign-key FILE    private key that signs the agents' packages
  --make-key FILE    create a private key in FILE, and no packages
  --old-key FILE     with --make-key: the previous key, which signs the new key
  --help             print this help
`;
const options = {
  arch: { type: 'string' },
  only: { type: 'string', default: 'npm,tar,deb' },
  to: { type: 'string', default: join(root, 'dist') },
  fast: { type: 'boolean', default: false },
  'sign-key': { type: 'string' },
  'make-key': { type: 'string' },
  'old-key': { type: 'string' },
  help: { type: 'boolean', default: false },
} as const;
const values = readFlags();
const dist = resolve(values.to);
const wanted = arches.filter((arch) => values.arch === undefined || values.arch === arch);
const kinds = values.only.split(',');
const level = values.fast ? 1 : 6;
const packages = join(dist, 'packages');

/** Reads the flags. Ends this program if one is wrong. */
function readFlags() {
  try {
    return parseArgs({ options }).values;
  } catch (error) {
    return refuse(error);
  }
}

/** Prints an error without its stack, and ends this program. */
function refuse(error: unknown, exitCode = 2): never {
  process.stderr.write(`npm run package: ${reasonOf(error)}\n`);
  process.exit(exitCode);
}

async function main(): Promise<void> {
  if (values.help) {
    process.stdout.write(help);
    return;
  }
  if (values['make-key'] !== undefined)
    return printFile(await makeSigningKey(values['make-key'], values['old-key']));
  const signer = values['sign-key'] === undefined ? undefined : await loadSigningKey(values['sign-key']);
  if (wanted.length === 0) throw new StartError(`--arch must be one of ${arches.join(', ')}`);
  mkdirSync(dist, { recursive: true });
  const scratch = mkdtempSync(join(dist, '.making-'));
  try {
    if (kinds.includes('npm')) {
      // The types of the npm package refer to the generated types of the protos, which do not exist in a fresh clone.
      await run(process.execPath, ['scripts/generate-proto-types.ts']);
      printFile(await makeNpm(scratch, dist));
    }
    if (kinds.includes('tar') || kinds.includes('deb')) {
      await makePrograms(scratch, signer);
      if (!signer)
        process.stderr.write(
          'the packages are not signed, so a broker cannot upgrade agents with them; use --sign-key FILE to sign\n',
        );
    }
  } finally {
    rmSync(scratch, { recursive: true, force: true });
  }
}

/** Creates the packages of the agents first, because the packages of the brokers contain them. */
async function makePrograms(scratch: string, signer: Signer | undefined): Promise<void> {
  const agents: AgentPackage[] = [];
  for (const arch of wanted) agents.push(...(await make('farhand-agent', arch, scratch, signer)));
  rmSync(packages, { recursive: true, force: true });
  mkdirSync(packages);
  const sums: string[] = [];
  for (const { file, arch, kind } of agents) {
    const name = basename(file);
    linkSync(file, join(packages, name));
    const sha256 = await sha256Of(file);
    sums.push(`${sha256}  ${name}\n`);
    if (!signer) continue;
    const signature = join(packages, signatureFileOf(name));
    const { size } = statSync(file);
    writeFileSync(signature, signer.sign({ version, arch, kind, size, sha256 }));
    sums.push(`${await sha256Of(signature)}  ${basename(signature)}\n`);
  }
  writeFileSync(join(packages, 'SHA256SUMS'), sums.sort(byName).join(''));
  for (const arch of wanted) await make('farhand-broker', arch, scratch, signer);
}

const byName = (a: string, b: string): number => (a.slice(66) < b.slice(66) ? -1 : 1);

interface AgentPackage {
  file: string;
  arch: Arch;
  kind: SignedPackage['kind'];
}

/** Creates the packages of a program. An agent always gets a tar.gz, because install.sh of the broker needs it. */
async function make(
  name: Program,
  arch: Arch,
  scratch: string,
  signer: Signer | undefined,
): Promise<AgentPackage[]> {
  const program = join(scratch, `${name}-${version}-linux-${arch}`);
  await makeProgram(name, arch, program);
  // The broker serves the packages of the agents for download.
  if (name === 'farhand-broker') cpSync(packages, join(program, 'packages'), { recursive: true });
  // A machine that has no trusted key yet trusts this key when the package is installed.
  else if (signer) writeFileSync(join(program, 'trusted-key.pem'), signer.publicPem);
  const made: AgentPackage[] = [];
  const file = join(dist, `${basename(program)}.tar.gz`);
  if (kinds.includes('tar') || name === 'farhand-agent') {
    rmSync(file, { force: true });
    await archive(program, file, level);
    printFile(file);
    made.push({ file, arch, kind: 'tar.gz' });
  }
  if (kinds.includes('deb')) {
    const deb = join(dist, debName(name, arch));
    await makeDeb(name, arch, { program, scratch: join(scratch, `${name}-${arch}-deb`), file: deb, level });
    printFile(deb);
    made.push({ file: deb, arch, kind: 'deb' });
  }
  return made;
}

function printFile(file: string): void {
  process.stdout.write(`${file}\n`);
}

await main().catch((error: unknown) => {
  // Wrong flags, keys and passphrases are no fault of the build, so they need no stack.
  if (error instanceof StartError) refuse(error);
  // Neither are failed programs, and system errors such as that of a full disk.
  if (error instanceof StepFailed || (error instanceof Error && 'syscall' in error)) refuse(error, 1);
  throw error;
});

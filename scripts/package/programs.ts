// Makes directories of farhand-agent and farhand-broker that need no software on the machine, not even Node.
import { chmodSync, cpSync, mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { addShare } from '../man.ts';
import { addAddons, addBinaries } from './binaries.ts';
import { bundlePrograms, type Entry } from './bundles.ts';
import { type Arch, version } from './ground.ts';

/** Packages by name, with the programs in each and the flags of Node to run them. */
export const programs = {
  'farhand-agent': { entries: ['farhand-agent'], summary: 'lets a Farhand broker reach this machine' },
  'farhand-broker': { entries: ['farhand-broker', 'farhand'], summary: 'control plane for remote machines' },
} as const satisfies Record<string, { entries: Entry[]; summary: string }>;
export type Program = keyof typeof programs;

/**
 * Flags of Node that save memory: agents idle on machines with other work. They do not slow its transfers.
 */
const agentFlags =
  '--optimize-for-size --max-semi-space-size=1 --single-threaded --v8-pool-size=0' +
  // No function that only runs at start is worth loading the optimizing compiler, 5 MiB of Node's binary.
  ' --invocation-count-for-turbofan=30000' +
  // Unpacking the heap snapshot in Node's binary reads 4 MiB more than it saves, and saves 0.04 s.
  ' --no-node-snapshot';

/** Fills a new directory with a program. */
export async function makeProgram(name: Program, arch: Arch, folder: string): Promise<void> {
  const { entries } = programs[name];
  mkdirSync(join(folder, 'bin'), { recursive: true });
  await bundlePrograms(entries, folder);
  const manifest = { name, version, type: 'module', license: 'Apache-2.0' };
  writeFileSync(join(folder, 'package.json'), `${JSON.stringify(manifest, undefined, 2)}\n`);
  for (const entry of entries) addLauncher(folder, entry);
  await addShare(join(folder, 'share'), entries);
  await addBinaries(folder, arch);
  if (name === 'farhand-agent') await addAddons(folder, arch);
}

/** Copies the agents' packages, which a broker hands out, into its directory. */
export function addPackages(folder: string, packages: string): void {
  cpSync(packages, join(folder, 'packages'), { recursive: true });
}

function addLauncher(folder: string, entry: Entry): void {
  const launcher = join(folder, 'bin', entry);
  writeFileSync(launcher, launcherText(entry));
  chmodSync(launcher, 0o755);
}

/**
 * The launcher script. Sets `FARHAND_PROGRAM` to the name it was called by, which stays the same at updates.
 */
function launcherText(entry: Entry): string {
  const isAgent = entry === 'farhand-agent';
  return `#!/bin/sh
# Runs ${entry} with the Node of its own package.
case $0 in /*) FARHAND_PROGRAM=$0 ;; *) FARHAND_PROGRAM=$PWD/$0 ;; esac
export FARHAND_PROGRAM${isAgent ? ' MALLOC_ARENA_MAX=1' : ''}
home=$(readlink -f "$0") && home=\${home%/bin/*} || exit 1
exec "$home/node" ${isAgent ? `${agentFlags} ` : ''}"$home/lib/${entry}.js" "$@"
`;
}

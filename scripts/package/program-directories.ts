// Creates directories with farhand-agent or farhand-broker and its own Node. The programs in them need no other
// software on the machine.
import { chmodSync, mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { agentFlags, agentVariables } from '../agent-memory-settings.ts';
import { addShare } from '../man-pages-and-completions.ts';
import { bundlePrograms, type Entry } from './bundles.ts';
import { addAddons, addBinaries } from './node-and-addons.ts';
import { type Arch, version } from './shared-by-packaging-steps.ts';

/** The packages by name: the programs in each, and its description. */
export const programs = {
  'farhand-agent': { entries: ['farhand-agent'], summary: 'lets a Farhand broker control this machine' },
  'farhand-broker': { entries: ['farhand-broker', 'farhand'], summary: 'control plane for remote machines' },
} as const satisfies Record<string, { entries: Entry[]; summary: string }>;
export type Program = keyof typeof programs;

/** Puts a program, its Node and its files into a new directory. */
export async function makeProgram(name: Program, arch: Arch, folder: string): Promise<void> {
  const { entries } = programs[name];
  mkdirSync(join(folder, 'bin'), { recursive: true });
  await bundlePrograms(entries, folder);
  const manifest = { name, version, type: 'module', license: 'Apache-2.0' };
  writeFileSync(join(folder, 'package.json'), `${JSON.stringify(manifest, undefined, 2)}\n`);
  for (const entry of entries) {
    const launcher = join(folder, 'bin', entry);
    writeFileSync(launcher, launcherText(entry));
    chmodSync(launcher, 0o755);
  }
  await addShare(join(folder, 'share'), entries);
  await addBinaries(folder, arch);
  if (name === 'farhand-agent') await addAddons(folder, arch);
}

/** Returns the launcher script. It sets FARHAND_PROGRAM to its own path, which stays the same after updates. */
function launcherText(entry: Entry): string {
  const isAgent = entry === 'farhand-agent';
  const variables = Object.entries(isAgent ? agentVariables : {}).map(([name, value]) => ` ${name}=${value}`);
  // Node opens /dev/null if standard input or output is closed, and every read or write would succeed. It fails if the
  // file is open only for the other direction.
  const closed =
    entry === 'farhand'
      ? '{ true 3<&0; } 2>/dev/null || exec 0>/dev/null\n{ true 3>&1; } 2>/dev/null || exec 1</dev/null\n'
      : '';
  const flags = (isAgent ? agentFlags : []).map((flag) => `${flag} `);
  return `#!/bin/sh
# Runs ${entry} with the Node of its own package.
case $0 in /*) FARHAND_PROGRAM=$0 ;; *) FARHAND_PROGRAM=$PWD/$0 ;; esac
export FARHAND_PROGRAM${variables.join('')}
home=$(readlink -f "$0") && home=\${home%/bin/*} || exit 1
${closed}exec "$home/node" ${flags.join('')}"$home/lib/${entry}.js" "$@"
`;
}

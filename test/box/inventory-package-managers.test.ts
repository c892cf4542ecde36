// Compares the inventory with the package managers of four distributions. In a separate root file system, an agent
// reports packages and pending updates. Then the package manager installs its updates, which must be the reported ones.
import { readdirSync } from 'node:fs';
import { describe, expect } from 'vitest';
import { mayMount } from '../file-operations-fixture.ts';
import { lacks, needs } from '../skip-without-programs.ts';
import { startFarhand } from '../start-farhand.ts';
import { program } from '../start-processes.ts';
import { waitFor } from '../wait-for.ts';
import { managers, type PackageManager, type Packages, Root } from './package-manager-roots.ts';

/** Long, because each of the four runs of makepkg needs 2 s of CPU time. */
const ms = 240_000;
const longName = 'a_package_whose_name_is_longer_than_a_line_of_eighty_characters_in_a_terminal_of_a_machine';

/** Starts an agent in a root file system. Returns a function that collects the inventory. */
async function agentIn(root: Root) {
  const system = await startFarhand();
  const args = [
    '--broker',
    system.grpc,
    '--data-dir',
    '/run/agent',
    '--join-token',
    await system.joinToken(),
  ];
  await program('agent/main.ts', args, root.under).line('linked');
  const [machine] = (await system.client.machines.list()).items;
  if (!machine) throw new Error('no machine has joined');
  return async () => {
    const found = await system.client.inventory.get({ machine_id: machine.id, refresh: 'true' });
    const { package_format, packages, updates, incomplete } = found;
    return {
      package_format,
      packages: packages.map(({ name, version }) => `${name} ${version}`).sort(),
      updates: updates.toSorted((a, b) => (a.name < b.name ? -1 : 1)),
      reasons: incomplete.flatMap(({ part, reason }) => (/^(packages|updates)$/.test(part) ? [reason] : [])),
    };
  };
}

/** Builds packages in two versions, makes a repository of all of them, and installs the older ones. */
function rootOf(manager: PackageManager, older: Packages, newer: Packages): Root {
  const root = new Root(manager);
  manager.build(older, root.repository);
  const files = readdirSync(root.repository);
  manager.build(newer, root.repository);
  manager.index(root.repository);
  root.install(files);
  return root;
}

/** Returns the updates that the package manager has installed, each with the newest version installed before. */
function changes(before: string[], after: string[]) {
  const newest = new Map(before.map(partsOf));
  const added = after.filter((line) => !before.includes(line)).map(partsOf);
  return added.map(([name, available]) => ({ name, installed: newest.get(name) ?? '', available }));
}

function partsOf(line: string): [name: string, version: string] {
  const [name = '', version = ''] = line.split(' ');
  return [name, version];
}

/**
 * Compares the inventory with the package manager three times: before it has fetched lists, with pending updates, and
 * after the updates.
 */
async function compare(root: Root, manager: PackageManager, unfetched: RegExp | undefined): Promise<void> {
  const collect = await agentIn(root);
  const before = root.installed();
  const untouched = root.snapshot();
  const first = await collect();
  expect(first.packages).toEqual(before);
  if (unfetched) expect([first.updates, first.reasons]).toEqual([[], [expect.stringMatching(unfetched)]]);
  expect(root.snapshot()).toEqual(untouched);

  root.run(manager.fetch);
  const fetched = root.snapshot();
  const found = await collect();
  expect(found).toMatchObject({ package_format: manager.format, packages: before, reasons: [] });
  expect(root.snapshot()).toEqual(fetched);
  root.run(manager.upgrade);
  const after = root.installed();
  expect(found.updates).toEqual(changes(before, after));
  expect(found.updates.length).toBeGreaterThan(3);
  expect(await collect()).toMatchObject({ packages: after, updates: [], reasons: [] });
}

describe.skipIf(!mayMount || lacks('unshare'))('package managers (need root that may mount)', () => {
  const older = (preRelease: string): Packages => [
    ['plain', '1.0'],
    [longName, '1.0'],
    ['epoch', '1.0'],
    ['stays', '1.0'],
    ['prerelease', preRelease],
  ];
  const newer: Packages = [
    ['plain', '1.1'],
    [longName, '1.1'],
    ['prerelease', '1.1'],
    ['epoch', '1:0.9'],
  ];

  for (const [name, unfetched, preRelease] of [
    ['zypper', /list of test was never fetched: run zypper refresh/, '1.1~rc1'],
    ['pacman', /pacman ended with 1: warning: database file for 'test' does not exist/, '1.1rc1'],
  ] as const) {
    const manager = managers[name];
    needs(...manager.programs)(
      `packages and updates are those of ${name}`,
      async () => {
        await compare(rootOf(manager, older(preRelease), newer), manager, unfetched);
      },
      ms,
    );
  }

  needs(...managers.apt.programs)(
    'packages and updates are those of apt',
    async () => {
      const named = (all: Packages): Packages =>
        all.map(([name, version]) => [name.replaceAll('_', '-'), version]);
      await compare(rootOf(managers.apt, named(older('1.1~rc1')), named(newer)), managers.apt, undefined);
    },
    ms,
  );

  needs(...managers.dnf.programs)(
    'packages and updates are those of dnf, also of a package in two versions and of a new architecture',
    async () => {
      const { dnf } = managers;
      const arch = process.arch === 'x64' ? 'x86_64' : 'aarch64';
      const kernel = 'kernel';
      const root = rootOf(
        dnf,
        [...older('1.1~rc1'), ['moves', '1.0'], [kernel, '1.0', arch]],
        [...newer, ['moves', '1.1', arch], [kernel, '1.1', arch], [kernel, '1.2', arch]],
      );
      const installedAt = Number(root.run("rpm -q kernel --queryformat '%{INSTALLTIME}'"));
      // Waits for the next second, because package managers record the time of an installation in seconds.
      await waitFor(() => expect(Math.floor(Date.now() / 1000)).toBeGreaterThan(installedAt));
      root.install(readdirSync(root.repository).filter((file) => file.startsWith('kernel-1.1')));
      await compare(root, dnf, undefined);
    },
    ms,
  );
});

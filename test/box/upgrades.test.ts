// Upgrades by signed packages on a booted Debian. An agent must work afterwards, whatever the package contains and
// whenever the machine is interrupted. Each test continues with the state that the tests before it left.
import { execFileSync } from 'node:child_process';
import { cpSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { beforeAll, describe, expect, test } from 'vitest';
import { fingerprintOf, signKeyChange } from '../../shared/agent-package-signature.ts';
import { version } from '../../shared/version.ts';
import { shared as onePerFile } from '../close-after-tests.ts';
import { makeSigner, type SignedUpgrade } from '../sign-packages.ts';
import { temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';
import { containerOfFile, type Ran } from './boot-container.ts';
import { buildPackages, built } from './build-packages.ts';
import { type UpgradingBroker, upgradingBroker } from './upgrading-broker.ts';

const box = containerOfFile();
const broker = onePerFile(upgradingBroker);
const [owner, successor, stranger] = [makeSigner(), makeSigner(), makeSigner()];

/**
 * Shell lines to insert at the start of a launcher. `--config*` matches only the start of the service: in other calls,
 * such as `--version`, this flag is not the first argument.
 */
const launchers = {
  good: '',
  crashing: 'case "$*" in --config*) exit 3 ;; esac',
  unlinked: 'case "$*" in --config*) set -- "$@" --broker 127.0.0.1:1 ;; esac',
  lying: 'case "$*" in --version) echo 1.2.3; exit ;; esac',
};
type Behaviour = keyof typeof launchers;
type Kind = 'tar.gz' | 'deb';

/** The checkout's Node in the container, where the checkout is at /opt/farhand. */
const nodeInBox = `/opt/farhand/node_modules/node-linux-${process.arch}/bin/node`;

/** Changes the version and the launcher of an unpacked package. */
function alter(home: string, to: string, behaviour: Behaviour): void {
  const sources = readdirSync(join(home, 'lib')).map((name) => join(home, 'lib', name));
  for (const file of [...sources, join(home, 'package.json')]) {
    const text = readFileSync(file, 'utf8');
    if (text.includes(`"${version}"`)) writeFileSync(file, text.replaceAll(`"${version}"`, `"${to}"`));
  }
  const launcher = join(home, 'bin/farhand-agent');
  const [first, ...rest] = readFileSync(launcher, 'utf8').split('\n');
  writeFileSync(launcher, [first, launchers[behaviour], ...rest].join('\n'));
}

const sourceOf = (kind: Kind): string =>
  join(
    built,
    readdirSync(built).find((name) => name.startsWith('farhand-agent') && name.endsWith(kind)) ?? '',
  );

/** Unpacks the built package of this kind. */
function unpack(kind: Kind, tree: string): void {
  if (kind === 'deb') return void execFileSync('dpkg-deb', ['--raw-extract', sourceOf(kind), tree]);
  mkdirSync(tree);
  execFileSync('tar', ['-xzf', sourceOf(kind), '-C', tree]);
}

/** Returns the directory of the program in an unpacked package. */
const homeIn = (kind: Kind, tree: string): string =>
  join(tree, kind === 'deb' ? 'usr/lib/farhand-agent' : (readdirSync(tree)[0] ?? ''));

/** Unpacks a package, and replaces its 120 MB Node by a script that executes the checkout's Node. */
async function unpackWithoutNode(kind: Kind): Promise<string> {
  const tree = join(temporaryFolder('without-node'), 'tree');
  unpack(kind, tree);
  const node = join(homeIn(kind, tree), 'node');
  rmSync(node);
  writeFileSync(node, `#!/bin/sh\nexec ${nodeInBox} "$@"\n`, { mode: 0o755 });
  return tree;
}

const withoutNode = {
  'tar.gz': onePerFile(() => unpackWithoutNode('tar.gz')),
  deb: onePerFile(() => unpackWithoutNode('deb')),
};

/**
 * Makes a package of another version from the built package. A `whole` package includes Node, like the packages for
 * users. In any other package a script replaces Node, so it has only 1 MB.
 */
async function packageOf(kind: Kind, to: string, behaviour: Behaviour, whole: boolean): Promise<Buffer> {
  const folder = temporaryFolder('altered');
  const [tree, file] = [join(folder, 'tree'), join(folder, 'file')];
  if (whole) unpack(kind, tree);
  else cpSync(await withoutNode[kind](), tree, { recursive: true, verbatimSymlinks: true });
  alter(homeIn(kind, tree), to, behaviour);
  if (kind === 'tar.gz') {
    execFileSync('tar', ['-cf', file, '--use-compress-program=gzip -1', '-C', tree, ...readdirSync(tree)]);
  } else {
    const control = join(tree, 'DEBIAN/control');
    writeFileSync(control, readFileSync(control, 'utf8').replace(/^Version: .*/m, `Version: ${to}`));
    execFileSync('dpkg-deb', ['--root-owner-group', '-Zgzip', '-z1', '--build', tree, file]);
  }
  return readFileSync(file);
}

describe('in a container with systemd', { timeout: 180_000 }, () => {
  let upgrades = 0;
  const up = (): Promise<UpgradingBroker> => broker();
  const agent = (...args: string[]): Promise<Ran> => box.run('farhand-agent', ...args);
  const property = async (name: string, unit = 'farhand-agent'): Promise<string> =>
    (await box.run('systemctl', 'show', unit, '--value', `--property=${name}`)).stdout.trim();
  const inBox = (path: string): string => join(box.root, path);
  const shared = '/var/lib/farhand-agent-upgrade';

  /** Sends a package of this version. Resolves with the id of the upgrade and the end of the call. */
  async function send(
    kind: Kind,
    to: string,
    options: {
      behaviour?: Behaviour;
      signer?: typeof owner;
      signed?: Partial<SignedUpgrade>;
      seconds?: number;
      whole?: boolean;
    } = {},
  ): Promise<{ id: string; answers: string[]; end: string }> {
    upgrades += 1;
    const id = `upg_${upgrades}`;
    const content = await packageOf(kind, to, options.behaviour ?? 'good', options.whole ?? false);
    const signed = { ...(options.signer ?? owner).sign(content, { version: to, kind }), ...options.signed };
    const link_timeout_ms = (options.seconds ?? 60) * 1000;
    return { id, ...(await (await up()).stage(signed, content, { upgrade_id: id, link_timeout_ms })) };
  }

  /** Waits for the end of an upgrade, and until an agent of version `runs` is linked. */
  async function outcome(id: string, runs: string, milliseconds = 120_000): Promise<Record<string, unknown>> {
    const { linked, lastUpgrade } = await up();
    await waitFor(
      () => {
        const last = lastUpgrade();
        expect([last?.upgrade_id, last?.outcome]).toEqual([id, expect.not.stringContaining('RUNNING')]);
        expect(linked()?.agent_version).toBe(runs);
      },
      { timeout: milliseconds, interval: 200 },
    );
    await waitFor(
      async () => expect(await property('ActiveState', 'farhand-agent-upgrade')).toBe('inactive'),
      {
        timeout: 60_000,
        interval: 200,
      },
    );
    expect(
      (await box.run('ls', `${shared}/state.json`, `${shared}/request.json`, `${shared}/rescue`)).stdout,
    ).toBe('');
    expect((await agent('--version')).stdout).toBe(`${runs}\n`);
    return { ...lastUpgrade() };
  }

  const online = async (): Promise<void> => {
    const { linked } = await up();
    await waitFor(() => expect(linked()).toBeDefined(), { timeout: 60_000, interval: 100 });
  };

  beforeAll(() => buildPackages(), 300_000);

  describe.each<Kind>(['tar.gz', 'deb'])('an agent from a %s', (kind) => {
    /** A test that does not depend on the kind of package, and so runs with one kind only. */
    const testOnce = kind === 'tar.gz' ? test : (_name: string, _run: () => Promise<void>): void => {};

    test('is installed with root’s upgrade unit and a trusted key', async () => {
      const { address, joinToken } = await up();
      writeFileSync(inBox('root/key.pub'), owner.pem);
      if (kind === 'tar.gz') {
        const folder = '/opt/farhand-agent/first';
        mkdirSync(inBox(folder), { recursive: true });
        execFileSync('tar', ['-xzf', sourceOf(kind), '-C', inBox(folder), '--strip-components=1']);
        await box.run('ln', '-s', 'first', '/opt/farhand-agent/current');
        await box.run('ln', '-s', '/opt/farhand-agent/current/bin/farhand-agent', '/usr/local/bin/');
      } else {
        cpSync(sourceOf(kind), inBox('root/agent.deb'));
        expect(await box.run('dpkg', '--install', '/root/agent.deb')).toMatchObject({ code: 0 });
      }
      const without = await agent('install', '--broker', address, '--join-token', joinToken());
      expect(without).toMatchObject({ code: 0, stderr: '' });
      await online();
      const facts = { kind: kind === 'deb' ? 'PACKAGE_KIND_DEB' : 'PACKAGE_KIND_TAR_GZ', upgrade_unit: true };
      expect((await up()).linked()?.installation).toMatchObject({ ...facts, trusted_key: '' });
      expect((await send(kind, '9.1.0')).end).toBe('no_trusted_key');
      expect((await agent('doctor')).stdout).toMatch(/warn +trusted key/);
      expect(await agent('trust-key', '/root/key.pub')).toMatchObject({ code: 0, stderr: '' });
      expect((await agent('doctor')).stdout).toMatch(/ok +trusted key +[0-9a-f]{64}\n/);
      expect(await agent('install')).toMatchObject({ code: 0, stderr: '' });
      const stats = await box.run(
        'stat',
        '-c',
        '%U %a',
        shared,
        `${shared}/incoming`,
        `${shared}/trusted-key.pem`,
      );
      expect(stats.stdout).toBe('root 755\nfarhand-agent 700\nroot 644\n');
      await online();
    });

    test('is replaced by a signed version, and stays the same machine', async () => {
      const before = (await up()).linked()?.machine_id;
      const { id, answers, end } = await send(kind, '9.1.0', { whole: true });
      expect([answers, end]).toEqual([['staged', 'switching'], 'link lost']);
      expect(await outcome(id, '9.1.0')).toMatchObject({
        outcome: 'UPGRADE_OUTCOME_SUCCEEDED',
        from_version: version,
        to_version: '9.1.0',
        reason: '',
      });
      expect((await up()).linked()?.machine_id).toBe(before);
    });

    testOnce(
      'refuses a wrong signature, also if a program of the agent’s user sends the request to root',
      async () => {
        const pid = await property('MainPID');
        expect((await send(kind, '9.2.0', { signer: stranger })).end).toBe('untrusted_key');
        expect((await send(kind, '9.2.0', { signed: { version: '9.2.1' } })).end).toBe('wrong_signature');
        const content = Buffer.from('#!/bin/sh\n');
        const forged = { ...stranger.sign(content, { version: '9.2.0', kind }), upgrade_id: 'upg_forged' };
        const text = (value: unknown): unknown => (Buffer.isBuffer(value) ? value.toString('base64') : value);
        const json = Object.fromEntries(Object.entries(forged).map(([name, value]) => [name, text(value)]));
        writeFileSync(inBox('var/tmp/request'), JSON.stringify({ ...json, link_timeout_ms: 10_000 }));
        const ask = `cd ${shared}/incoming && echo x > package && cat /var/tmp/request > new && mv new request.json`;
        await box.run('runuser', '-u', 'farhand-agent', '--', 'sh', '-c', ask);
        const { lastUpgrade } = await up();
        await waitFor(
          () =>
            expect(lastUpgrade()).toMatchObject({
              upgrade_id: 'upg_forged',
              outcome: 'UPGRADE_OUTCOME_FAILED',
              reason: expect.stringContaining('another key'),
            }),
          { timeout: 30_000 },
        );
        expect(await property('MainPID')).toBe(pid);
      },
    );

    test('stays unchanged if the package is not what it claims to be, and is restored if the new version does not start', async () => {
      const lying = await send(kind, '9.2.0', { behaviour: 'lying' });
      expect(lying.answers).toEqual(['staged', 'switching']);
      expect(lying.end).toContain('the program in the package is version 1.2.3, not 9.2.0');
      const crashing = await send(kind, '9.2.0', { behaviour: 'crashing' });
      expect(await outcome(crashing.id, '9.1.0')).toMatchObject({
        outcome: 'UPGRADE_OUTCOME_ROLLED_BACK',
        from_version: '9.1.0',
        to_version: '9.2.0',
        reason: expect.stringContaining('fails at every'),
      });
      if (kind === 'deb') {
        const { stdout } = await box.run('dpkg-query', '--status', 'farhand-agent');
        expect(stdout).toMatch(/^Status: install ok installed\n(.*\n)*Version: 9\.1\.0$/m);
      }
    });

    testOnce('goes back if the new version starts and does not link', async () => {
      const { id } = await send(kind, '9.2.0', { behaviour: 'unlinked', seconds: 10 });
      expect(await outcome(id, '9.1.0')).toMatchObject({
        outcome: 'UPGRADE_OUTCOME_ROLLED_BACK',
        reason: expect.stringContaining('did not link within 10 s'),
      });
    });

    testOnce(
      'finishes an upgrade after a reboot in the middle, and after root’s unit was killed',
      async () => {
        const { id } = await send(kind, '9.3.0');
        const { linked, lastUpgrade } = await up();
        await waitFor(() => expect(linked()?.agent_version).toBe('9.3.0'), {
          timeout: 90_000,
          interval: 100,
        });
        expect(lastUpgrade()).toMatchObject({ upgrade_id: id, outcome: 'UPGRADE_OUTCOME_RUNNING' });
        await box.reboot();
        expect(await outcome(id, '9.3.0')).toMatchObject({ outcome: 'UPGRADE_OUTCOME_SUCCEEDED' });
        const again = await send(kind, '9.4.0');
        await waitFor(() => expect(linked()?.agent_version).toBe('9.4.0'), {
          timeout: 90_000,
          interval: 100,
        });
        await box.run('systemctl', 'kill', '--signal=KILL', 'farhand-agent-upgrade');
        expect(await outcome(again.id, '9.4.0')).toMatchObject({ outcome: 'UPGRADE_OUTCOME_SUCCEEDED' });
      },
    );

    testOnce('goes back if the machine reboots while it tries a version that does not link', async () => {
      const { id } = await send(kind, '9.5.0', { behaviour: 'unlinked', seconds: 20 });
      await waitFor(async () => expect((await agent('--version')).stdout).toBe('9.5.0\n'), {
        timeout: 90_000,
        interval: 100,
      });
      await box.reboot();
      expect(await outcome(id, '9.4.0')).toMatchObject({ outcome: 'UPGRADE_OUTCOME_ROLLED_BACK' });
    });

    testOnce(
      'after an upgrade with a new key that the old key has signed, trusts only the new key',
      async () => {
        const key_changes = [signKeyChange(successor.raw, owner.privateKey)];
        const first = await send(kind, '9.6.0', { signer: successor, signed: { key_changes } });
        expect(await outcome(first.id, '9.6.0')).toMatchObject({ outcome: 'UPGRADE_OUTCOME_SUCCEEDED' });
        expect((await send(kind, '9.7.0')).end).toBe('untrusted_key');
        // An older version is installed in the same way as a newer one.
        const second = await send(kind, '9.0.0', { signer: successor });
        expect(await outcome(second.id, '9.0.0')).toMatchObject({ outcome: 'UPGRADE_OUTCOME_SUCCEEDED' });
        expect((await agent('doctor')).stdout).toContain(fingerprintOf(successor.raw));
      },
    );

    test('is held by its owner, and uninstalled without a trace', async () => {
      expect(await agent('install', '--hold-version', '1.0.0')).toMatchObject({ code: 0 });
      await online();
      expect((await send(kind, '9.8.0')).end).toBe('held');
      expect(await agent('uninstall')).toMatchObject({ code: 0 });
      if (kind === 'deb')
        expect(await box.run('dpkg', '--purge', 'farhand-agent')).toMatchObject({ code: 0 });
      const found = await box.run(
        'find',
        '/etc',
        '/opt/farhand-agent',
        '/usr',
        '/var/lib',
        '-name',
        '*farhand-agent*',
      );
      expect(found.stdout).toBe('');
      rmSync(inBox('root/agent.deb'), { force: true });
    });
  });
});

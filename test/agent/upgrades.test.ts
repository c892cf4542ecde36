// Upgrades on the machine's side: what the agent refuses, what it passes to root's upgrade unit, and what that unit
// accepts from a directory of the agent's user.
import { execFileSync, spawn } from 'node:child_process';
import {
  appendFileSync,
  existsSync,
  linkSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  rmdirSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test, vi } from 'vitest';
import * as z from 'zod';
import { agentSettings } from '../../agent/settings-schema.ts';
import { readResult, requestSchema, upgradePaths } from '../../agent/upgrade/files-shared-with-root.ts';
import { Upgrades, type UpgradesOptions } from '../../agent/upgrade/index.ts';
import { applyUpgrade } from '../../agent/upgrade/root-unit/apply-upgrade.ts';
import { takeRequest, verifiedCopy } from '../../agent/upgrade/root-unit/take-request.ts';
import { faultOfRestored } from '../../agent/upgrade/root-unit/try-version.ts';
import { trustKey } from '../../agent/upgrade/trusted-key.ts';
import type { StageUpgradeRequest__Output } from '../../proto/types/farhand/agent/v1/StageUpgradeRequest.ts';
import { fingerprintOf, signKeyChange } from '../../shared/agent-package-signature.ts';
import { methods } from '../../shared/agent-rpcs.ts';
import { readSettings } from '../../shared/read-settings.ts';
import { version } from '../../shared/version.ts';
import { atEnd } from '../close-after-tests.ts';
import { mayMount } from '../file-operations-fixture.ts';
import { firstMessageFor, makeSigner, type SignedUpgrade } from '../sign-packages.ts';
import { quiet, temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';

const owner = makeSigner();
const bytes = Buffer.alloc(300_000, 'farhand');

/** Makes root's directory on a machine that trusts the owner's key. */
function machine(
  trusted: string | undefined = owner.pem,
  kind: string | undefined = 'tar.gz',
  directory = temporaryFolder('upgrade'),
): string {
  const { incoming, installed, trustedKey } = upgradePaths(directory);
  mkdirSync(incoming);
  if (kind) writeFileSync(installed, JSON.stringify({ kind }));
  if (trusted) writeFileSync(trustedKey, trusted);
  return directory;
}

function upgradesOf(directory: string, more: Partial<UpgradesOptions> = {}): Upgrades {
  const processes = { running: () => 0, refuseStarts: () => undefined };
  const upgrades = new Upgrades({ directory, holdVersion: undefined, processes, log: quiet, ...more });
  atEnd(() => upgrades.close());
  return upgrades;
}

/** Encodes messages and decodes them again, as on the wire. */
async function* overWire(...messages: object[]): AsyncGenerator<StageUpgradeRequest__Output> {
  const shape = methods.get('StageUpgrade');
  // The cast is safe: this method's decoder makes these messages.
  for (const one of messages)
    yield shape?.decodeRequest(shape.encodeRequest(one)) as StageUpgradeRequest__Output;
}

function packageMessages(open: object, content = bytes): object[] {
  return [
    { open },
    { chunk: content.subarray(0, 100_000) },
    { chunk: content.subarray(100_000) },
    { commit: {} },
  ];
}

/** Stages an upgrade. Returns the names of the answers, and the error with which it ended. */
async function stage(
  upgrades: Upgrades,
  messages: object[],
  signal = new AbortController().signal,
  answers: string[] = [],
): Promise<{ answers: string[]; error: unknown }> {
  try {
    for await (const answer of upgrades.handlers.stageUpgrade(overWire(...messages), { signal }))
      answers.push(...Object.keys(answer));
    return { answers, error: undefined };
  } catch (error) {
    return { answers, error };
  }
}

const refused = (code: string, reason: string) => expect.objectContaining({ code, details: { reason } });

describe('the agent refuses', () => {
  const stranger = makeSigner();
  const signed = owner.sign(bytes);
  const forged = { ...signed, signature: stranger.sign(bytes).signature };
  const cases: [string, SignedUpgrade, string, string][] = [
    ['a package of another key', stranger.sign(bytes), 'precondition_failed', 'untrusted_key'],
    ['a signature by another key', forged, 'validation_failed', 'wrong_signature'],
    [
      'another version than the signed one',
      { ...signed, version: '9.9.8' },
      'validation_failed',
      'wrong_signature',
    ],
    ['another size than the signed one', { ...signed, size: 5 }, 'validation_failed', 'wrong_signature'],
    ['another architecture', owner.sign(bytes, { arch: 'mips' }), 'validation_failed', 'wrong_architecture'],
    ['another kind of package', owner.sign(bytes, { kind: 'deb' }), 'validation_failed', 'wrong_kind'],
    ['the version that runs', owner.sign(bytes, { version }), 'conflict', 'same_version'],
    [
      'a new key that is not signed by the old key',
      stranger.sign(bytes, {}, [signKeyChange(stranger.raw, stranger.privateKey)]),
      'precondition_failed',
      'untrusted_key',
    ],
  ];
  test.each(cases)('%s', async (_what, upgrade, code, reason) => {
    const directory = machine();
    const { answers, error } = await stage(upgradesOf(directory), packageMessages(firstMessageFor(upgrade)));
    expect([answers, error]).toEqual([[], refused(code, reason)]);
    expect(readdirSync(upgradePaths(directory).incoming)).toEqual([]);
  });

  test('any package without a trusted key or root’s unit, or if the owner accepts only another version', async () => {
    const open = packageMessages(firstMessageFor(signed));
    const without = upgradesOf(machine(''));
    expect((await stage(without, open)).error).toEqual(refused('precondition_failed', 'no_trusted_key'));
    const checkout = upgradesOf(machine(owner.pem, ''));
    expect((await stage(checkout, open)).error).toEqual(refused('not_supported', 'not_installed'));
    const held = upgradesOf(machine(), { holdVersion: '9.9.8' });
    expect((await stage(held, open)).error).toEqual(refused('permission_denied', 'held'));
    expect(held.installation()).toMatchObject({
      hold_version: '9.9.8',
      kind: 'PACKAGE_KIND_TAR_GZ',
      trusted_key: fingerprintOf(owner.raw),
      upgrade_unit: true,
      last_upgrade: null,
    });
  });

  test.each([
    ['changed', Buffer.from(bytes).fill('x', 200_000)],
    ['shorter', bytes.subarray(0, 200_000)],
    ['longer', Buffer.concat([bytes, Buffer.from('more')])],
  ])('%s bytes, and leaves none of them', async (_what, content) => {
    const directory = machine();
    const { answers, error } = await stage(
      upgradesOf(directory),
      packageMessages(firstMessageFor(signed), content),
    );
    expect([answers, error]).toEqual([[], refused('validation_failed', 'wrong_hash')]);
    expect(readdirSync(upgradePaths(directory).incoming)).toEqual([]);
  });

  // The package has 293 KiB. In 296 KiB there is space for the package, but not for the request to root.
  test.skipIf(!mayMount).each(['64k', '296k'])(
    'a package for which a disk of %s is too small (needs root)',
    async (size) => {
      const directory = machine();
      const { incoming } = upgradePaths(directory);
      execFileSync('mount', ['-t', 'tmpfs', '-o', `size=${size}`, 'tmpfs', incoming]);
      atEnd(() => void execFileSync('umount', [incoming]));
      const { error } = await stage(upgradesOf(directory), packageMessages(firstMessageFor(signed)));
      expect(error).toMatchObject({ code: 'no_space' });
      expect(readdirSync(incoming)).toEqual([]);
    },
  );

  test('an upgrade while a directory is at the package’s place, and takes the next one', async () => {
    const directory = machine();
    const { package: file, request } = upgradePaths(directory);
    const upgrades = upgradesOf(directory);
    mkdirSync(file);
    const { error } = await stage(upgrades, packageMessages(firstMessageFor(signed)));
    expect(error).toMatchObject({ code: expect.not.stringContaining('conflict') });
    rmdirSync(file);
    const stopping = new AbortController();
    const next = stage(upgrades, packageMessages(firstMessageFor(signed)), stopping.signal);
    await waitFor(() => expect(existsSync(request)).toBe(true));
    stopping.abort();
    expect((await next).answers).toEqual(['staged', 'switching']);
  });

  test('a request without commit, and an id that names a path', async () => {
    const directory = machine();
    const cut = packageMessages(firstMessageFor(signed)).slice(0, -1);
    expect((await stage(upgradesOf(directory), cut)).error).toMatchObject({ code: 'invalid_request' });
    const named = packageMessages(firstMessageFor(signed, { upgrade_id: '../x' }));
    expect((await stage(upgradesOf(directory), named)).error).toMatchObject({ code: 'invalid_request' });
    expect(readdirSync(upgradePaths(directory).incoming)).toEqual([]);
  });

  test('a second upgrade while one waits, and an upgrade whose processes run for too long', async () => {
    const directory = machine();
    let started = true;
    const processes = { running: () => 2, refuseStarts: () => (started = false) };
    const upgrades = upgradesOf(directory, { processes });
    const stopping = new AbortController();
    const answers: string[] = [];
    const first = stage(upgrades, packageMessages(firstMessageFor(signed)), stopping.signal, answers);
    await waitFor(() => expect(answers).toEqual(['staged', 'waiting']));
    const second = await stage(upgrades, packageMessages(firstMessageFor(signed)));
    expect(second.error).toEqual(refused('conflict', 'in_progress'));
    stopping.abort();
    expect((await first).error).toBe(stopping.signal.reason);
    const late = await stage(upgrades, packageMessages(firstMessageFor(signed, { wait_ms: 1 })));
    expect(late.error).toEqual(refused('conflict', 'processes_running'));
    expect([started, readdirSync(upgradePaths(directory).incoming)]).toEqual([true, []]);
  });
});

test('a package that is right is handed to root, nothing starts meanwhile, and root’s refusal reaches the broker', async () => {
  const directory = machine();
  const { request, result, taken } = upgradePaths(directory);
  const starts: boolean[] = [];
  const counts = [2, 1, 1, 0];
  const processes = {
    running: () => counts.shift() ?? 0,
    refuseStarts: (refuse: boolean) => void starts.push(refuse),
  };
  const upgrades = upgradesOf(directory, { processes });
  const ended = stage(
    upgrades,
    packageMessages(firstMessageFor(owner.sign(bytes), { link_timeout_ms: 20_000 })),
  );
  await waitFor(() => expect(existsSync(request)).toBe(true));
  expect(starts).toEqual([true]);
  const { request: found } = (await takeRequest(directory)) ?? {};
  expect(found).toMatchObject({ upgrade_id: 'upg_1', version: '9.9.9', link_timeout_ms: 20_000 });
  expect(existsSync(taken)).toBe(true);
  const last = { upgrade_id: 'upg_1', from_version: version, to_version: '9.9.9', reason: 'disk full' };
  writeFileSync(result, JSON.stringify({ ...last, outcome: 'FAILED', finished_at_ms: 5 }));
  const { answers, error } = await ended;
  expect(answers).toEqual(['staged', 'waiting', 'waiting', 'switching']);
  expect(error).toMatchObject({ code: 'machine_error', message: expect.stringContaining('disk full') });
  expect(starts).toEqual([true, false]);
  expect(upgrades.lastUpgrade()).toEqual({ ...last, outcome: 'UPGRADE_OUTCOME_FAILED', finished_at_ms: 5 });
  const again = await stage(upgrades, packageMessages(firstMessageFor(owner.sign(bytes))));
  expect(again.error).toEqual(refused('conflict', 'already_taken'));
});

test('packages of a new key are accepted by the signature of the old one, over several changes', async () => {
  const [second, third] = [makeSigner(), makeSigner()];
  const changes = [signKeyChange(second.raw, owner.privateKey), signKeyChange(third.raw, second.privateKey)];
  for (const trusted of [owner, second, third]) {
    const directory = machine(trusted.pem);
    const stopping = new AbortController();
    const messages = packageMessages(firstMessageFor(third.sign(bytes, {}, changes)));
    const staged = stage(upgradesOf(directory), messages, stopping.signal);
    await waitFor(() => expect(existsSync(upgradePaths(directory).request)).toBe(true));
    stopping.abort();
    expect((await staged).answers).toEqual(['staged', 'switching']);
  }
  // A machine that trusts the third key refuses a package that the first key signed.
  const old = await stage(
    upgradesOf(machine(third.pem)),
    packageMessages(firstMessageFor(owner.sign(bytes))),
  );
  expect(old.error).toEqual(refused('precondition_failed', 'untrusted_key'));
});

describe('root’s unit', () => {
  const settings = (...flags: string[]) =>
    readSettings(agentSettings, { argv: ['--broker', 'b:1', ...flags], env: {} });
  /** Writes a request into the agent's directory, as any program of the agent's user could. */
  function ask(directory: string, upgrade: SignedUpgrade, content: Buffer | undefined = bytes): void {
    const { request, package: file } = upgradePaths(directory);
    const asked = { ...upgrade, upgrade_id: 'upg_1', link_timeout_ms: 10_000 };
    writeFileSync(request, JSON.stringify(z.encode(requestSchema, asked)));
    if (content) writeFileSync(file, content);
  }
  async function copied(directory: string, flags: string[] = []): Promise<unknown> {
    try {
      const taken = await takeRequest(directory);
      if (!taken) return 'nothing';
      await verifiedCopy(directory, taken.request, settings(...flags));
      return 'copied';
    } catch (error) {
      return error instanceof Error ? error.message : error;
    }
  }

  test('copies a package that is signed by the trusted key, and takes its request once', async () => {
    const directory = machine();
    ask(directory, owner.sign(bytes));
    expect(await copied(directory)).toBe('copied');
    expect(readFileSync(upgradePaths(directory).copy)).toEqual(bytes);
    expect(existsSync(upgradePaths(directory).request)).toBe(false);
    // The first run took the request, but did not finish. The second run finds the request that the first one took, and
    // reports an interrupted upgrade.
    expect(await takeRequest(directory)).toMatchObject({ interrupted: true });
  });

  test('verifies signature, hash and the owner’s lock itself', async () => {
    const stranger = makeSigner();
    const cases: [SignedUpgrade, Buffer | undefined, string[], RegExp][] = [
      [stranger.sign(bytes), bytes, [], /another key/],
      [{ ...owner.sign(bytes), version: '9.9.8' }, bytes, [], /signature is not/],
      [owner.sign(bytes), Buffer.from(bytes).fill('x'), [], /not have the size and SHA-256/],
      [owner.sign(bytes), bytes.subarray(1), [], /not have the size and SHA-256/],
      [owner.sign(bytes), bytes, ['--allow', 'exec'], /--allow/],
      [owner.sign(bytes), bytes, ['--hold-version', '1.0.0'], /--hold-version/],
    ];
    for (const [upgrade, content, flags, reason] of cases) {
      const directory = machine();
      ask(directory, upgrade, content);
      expect(await copied(directory, flags)).toMatch(reason);
    }
  });

  test.skipIf(!mayMount)('reports a full disk, and leaves none of what it wrote (needs root)', async () => {
    const directory = temporaryFolder('upgrade');
    execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=400k', 'tmpfs', directory]);
    atEnd(() => void execFileSync('umount', [directory]));
    machine(owner.pem, 'deb', directory);
    ask(directory, owner.sign(bytes, { kind: 'deb' }));
    await applyUpgrade(settings('--upgrade-dir', directory), quiet);
    const reason = expect.stringContaining('ENOSPC');
    expect(readResult(directory)).toMatchObject({ outcome: 'FAILED', reason });
    const left = ['incoming', 'installed.json', 'result.json', 'trusted-key.pem'];
    expect(readdirSync(directory).sort()).toEqual(left);
  });

  test.skipIf(!mayMount)('removes what an interrupted preparation has left (needs root)', async () => {
    const directory = machine(owner.pem, 'deb');
    ask(directory, owner.sign(bytes, { kind: 'deb' }));
    await takeRequest(directory);
    mkdirSync(join(directory, '.new-abcdef/usr'), { recursive: true });
    for (const name of ['.pack-abcdef.tar', 'package']) writeFileSync(join(directory, name), bytes);
    await applyUpgrade(settings('--upgrade-dir', directory), quiet);
    const reason = expect.stringContaining('interrupted');
    expect(readResult(directory)).toMatchObject({ outcome: 'FAILED', reason });
    const left = ['incoming', 'installed.json', 'result.json', 'trusted-key.pem'];
    expect(readdirSync(directory).sort()).toEqual(left);
  });

  test.skipIf(!mayMount)(
    'reports why it refuses a package, although an old file cannot be removed (needs root)',
    async () => {
      const directory = machine(owner.pem, 'deb');
      const busy = join(directory, '.new-abcdef');
      mkdirSync(busy);
      execFileSync('mount', ['-t', 'tmpfs', 'tmpfs', busy]);
      atEnd(() => void execFileSync('umount', [busy]));
      ask(directory, makeSigner().sign(bytes, { kind: 'deb' }));
      await applyUpgrade(settings('--upgrade-dir', directory), quiet);
      const reason = expect.stringContaining('another key');
      expect(readResult(directory)).toMatchObject({ outcome: 'FAILED', reason });
      expect(await takeRequest(directory)).toBe(undefined);
    },
  );

  test('follows no link, opens no pipe, and refuses a package that grows and an invalid request', async () => {
    const secret = join(temporaryFolder('secret'), 'secret');
    writeFileSync(secret, bytes);
    const places = ['package', 'request'] as const;
    for (const place of places) {
      const kinds: ((file: string) => void)[] = [
        (file) => symlinkSync(secret, file),
        (file) => void execFileSync('mkfifo', [file]),
        (file) => mkdirSync(join(file, 'x'), { recursive: true }),
      ];
      for (const make of kinds) {
        const directory = machine();
        ask(directory, owner.sign(bytes));
        const file = upgradePaths(directory)[place];
        rmSync(file);
        make(file);
        expect(await copied(directory)).not.toBe('copied');
        expect(readFileSync(secret)).toEqual(bytes);
        expect(existsSync(upgradePaths(directory).taken)).toBe(place === 'package');
      }
    }
    const growing = machine();
    ask(growing, owner.sign(bytes));
    appendFileSync(upgradePaths(growing).package, 'more');
    expect(await copied(growing)).toMatch(/not have the size and SHA-256/);
    // The unit copies the package to a new file. The agent's user could change the original file later.
    const linked = machine();
    ask(linked, owner.sign(bytes));
    linkSync(upgradePaths(linked).package, join(linked, 'kept'));
    expect(await copied(linked)).toBe('copied');
    writeFileSync(join(linked, 'kept'), 'evil');
    expect(readFileSync(upgradePaths(linked).copy)).toEqual(bytes);
  });

  test('copies what it verified while the agent’s user rewrites the package all the time', async () => {
    const directory = machine();
    const good = Buffer.alloc(20_000_000, 'good');
    ask(directory, owner.sign(good), good);
    const { package: file, copy } = upgradePaths(directory);
    const swap =
      'const f=require("fs"),[,p]=process.argv;console.log(1);for(let i=0;;i++){const h=f.openSync(p,"r+");f.writeSync(h,"evil",(i*4096)%20000000);f.closeSync(h)}';
    const writer = spawn(process.execPath, ['-e', swap, file], { stdio: ['ignore', 'pipe', 'inherit'] });
    await new Promise((resolve) => writer.stdout.once('data', resolve));
    const outcome = await copied(directory);
    writer.kill('SIGKILL');
    if (outcome === 'copied') expect(readFileSync(copy)).toEqual(good);
    else expect(outcome).toMatch(/not have the size and SHA-256/);
  });
});

test('trust-key accepts only an Ed25519 public key, and names the key that it replaces', async () => {
  const folder = temporaryFolder('keys');
  const file = join(folder, 'key.pub');
  writeFileSync(file, owner.privateKey.export({ format: 'pem', type: 'pkcs8' }));
  if (process.getuid?.() !== 0) return await expect(trustKey([file])).rejects.toThrow('must be run as root');
  await expect(trustKey([])).rejects.toThrow('trust-key FILE');
  await expect(trustKey([file], folder)).rejects.toThrow('no Ed25519 public key');
  writeFileSync(file, owner.pem);
  expect(await trustKey([file], folder)).toContain(fingerprintOf(owner.raw));
  const other = makeSigner();
  writeFileSync(file, other.pem);
  expect(await trustKey([file], folder)).toContain(`no longer ${fingerprintOf(owner.raw)}`);
  writeFileSync(upgradePaths(folder).trustedKey, 'damaged');
  const now = `This machine now accepts packages signed by ${fingerprintOf(other.raw)}.\n`;
  expect(await trustKey([file], folder)).toBe(now);
});

describe('after a rollback', () => {
  /**
   * Puts a fake `systemctl` on the PATH. It reports that the service runs version `version`, and after a restart
   * version `afterRestart`.
   */
  function serviceOf(version: string, afterRestart = version) {
    const folder = temporaryFolder('systemctl');
    const [running, calls] = [join(folder, 'running'), join(folder, 'calls')];
    writeFileSync(running, version);
    const script = `#!/bin/sh
echo "$1 $2" >> ${calls}
if [ "$1" = restart ]; then printf %s ${afterRestart} > ${running}; exit 0; fi
printf 'ActiveState=active\\nStatusText=linked (%s)\\n' "$(cat ${running})"
`;
    writeFileSync(join(folder, 'systemctl'), script, { mode: 0o755 });
    vi.stubEnv('PATH', `${folder}:${process.env.PATH}`);
    return () => readFileSync(calls, 'utf8').match(/restart .*/g);
  }

  test('the service is not started again if it runs the restored version', async () => {
    const restarts = serviceOf('0.1.0');
    expect(await faultOfRestored('true', '0.1.0')).toBeUndefined();
    expect(restarts()).toBeNull();
  });

  test('the service is started again if it still runs the version that failed', async () => {
    const restarts = serviceOf('0.2.0', '0.1.0');
    expect(await faultOfRestored('false', '0.1.0')).toBeUndefined();
    expect(restarts()).toEqual(['restart farhand-agent']);
  });

  test('an error is returned if the service does not run the restored version even after a restart', async () => {
    const restarts = serviceOf('0.2.0');
    expect(await faultOfRestored('false', '0.1.0')).toMatch(/does not run the restored version 0\.1\.0/);
    expect(restarts()).toHaveLength(1);
  });
});

// Upgrades of agents: waves, failures and their limit, machines that are offline or busy, cancelling, and rights. The
// machines are scripted; test/box/ has real ones.
import { mkdirSync, readdirSync, readFileSync, truncateSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { leapingClock } from './commands-fixture.ts';
import { makeSigner } from './sign-packages.ts';
import { packageOf, startUpgradeSystem } from './upgrades-fixture.ts';
import { waitFor } from './wait-for.ts';

const hour = 3_600_000;

test('a package that differs from the signed one is refused, and nothing of it is stored', async () => {
  const { client, dataDir, signing, call } = await startUpgradeSystem();
  const { file, bytes, signature } = packageOf('9.0.0', signing);
  const cut = client.packages.upload({ package: file, signature, content: bytes.subarray(1) });
  await expect(cut).rejects.toMatchObject({ code: 'validation_failed' });
  const changed = Buffer.from(bytes);
  changed[0] = (bytes[0] ?? 0) ^ 1;
  await expect(client.packages.upload({ package: file, signature, content: changed })).rejects.toMatchObject({
    code: 'validation_failed',
  });
  for (const name of [
    'x.tar.gz',
    '../../farhand-agent-9.0.0-linux-x64.tar.gz',
    file.replace('9.0.0', '9.0.1'),
  ])
    await expect(client.packages.upload({ package: name, signature, content: bytes })).rejects.toMatchObject({
      status: 422,
    });
  expect((await call('PUT', `/packages/${file}?signature=x`)).body.error.code).toBe('validation_failed');
  expect((await client.packages.list()).items).toEqual([]);
  expect(readdirSync(join(dataDir, 'packages'))).toEqual([]);
});

test('an uploaded package is listed with its key, is not replaced by another, and can be deleted', async () => {
  const { client, signing } = await startUpgradeSystem();
  const { file, bytes, signature, sha256 } = packageOf('9.0.0', signing);
  const stored = await client.packages.upload({ package: file, signature, content: bytes });
  const of = { version: '9.0.0', arch: 'x64', kind: 'tar.gz', size: bytes.length, sha256 };
  expect(stored).toMatchObject({ id: file, ...of, signed_by: signing.fingerprint, uploaded: true });
  expect(await client.packages.upload({ package: file, signature, content: bytes })).toEqual(stored);
  const other = packageOf('9.0.0', signing);
  await expect(
    client.packages.upload({ package: file, signature: other.signature, content: other.bytes }),
  ).rejects.toMatchObject({ code: 'already_exists' });
  expect((await client.packages.list()).items).toEqual([stored]);
  await client.packages.remove({ package: file });
  expect((await client.packages.list()).items).toEqual([]);
  await expect(client.packages.remove({ package: file })).rejects.toMatchObject({
    code: 'package_not_found',
  });
});

test('of two different packages with the same name that are uploaded at once, one is stored', async () => {
  const { client, signing, dataDir } = await startUpgradeSystem();
  for (let round = 0; round < 5; round += 1) {
    const both = [packageOf(`9.0.${round}`, signing), packageOf(`9.0.${round}`, signing)];
    const results = await Promise.allSettled(
      both.map(({ file, bytes, signature }) =>
        client.packages.upload({ package: file, signature, content: bytes }),
      ),
    );
    const [stored] = both.filter((_, at) => results[at]?.status === 'fulfilled');
    const refused = results.flatMap((one) => (one.status === 'rejected' ? [one.reason.code] : []));
    expect(refused).toEqual(['already_exists']);
    const file = stored?.file ?? '';
    expect(readFileSync(join(dataDir, 'packages', file)).equals(stored?.bytes ?? Buffer.alloc(0))).toBe(true);
    expect((await client.packages.list()).items.find(({ id }) => id === file)?.sha256).toBe(stored?.sha256);
  }
});

test('a key limited to machines adds and deletes no packages, because they are for all machines', async () => {
  const { client, keyed, machine, upload, signing } = await startUpgradeSystem();
  const { client: limited } = await keyed(['admin'], { machine_ids: [(await machine('a')).id] });
  await upload('9.0.0');
  const { file, bytes, signature } = packageOf('9.0.1', signing);
  const added = limited.packages.upload({ package: file, signature, content: bytes });
  await expect(added).rejects.toMatchObject({ code: 'forbidden' });
  const [stored] = (await client.packages.list()).items;
  const removed = limited.packages.remove({ package: stored?.id ?? '' });
  await expect(removed).rejects.toMatchObject({ code: 'forbidden' });
  expect((await client.packages.list()).items).toEqual([stored]);
});

test('uploaded packages take 4 GiB at most, and there is space again after one is deleted', async () => {
  const { client, dataDir, signing } = await startUpgradeSystem();
  const [first = ''] = Array.from({ length: 8 }, (_, at) => {
    const large = packageOf(`8.0.${at}`, signing, Buffer.from('x'));
    const path = join(dataDir, 'packages', large.file);
    const size = 512 * 1024 ** 2;
    mkdirSync(join(dataDir, 'packages'), { recursive: true });
    // Sparse files take no space on the disk.
    writeFileSync(path, '');
    truncateSync(path, size);
    writeFileSync(`${path}.sig`, JSON.stringify({ ...JSON.parse(large.signature), size }));
    return large.file;
  });
  const { file, bytes, signature } = packageOf('9.0.0', signing);
  const upload = () => client.packages.upload({ package: file, signature, content: bytes });
  await expect(upload()).rejects.toMatchObject({ code: 'no_space' });
  expect((await client.packages.list()).total).toBe(8);
  await client.packages.remove({ package: first });
  expect(await upload()).toMatchObject({ id: file });
});

test('machines are upgraded a wave at a time, each once, with an event of each step', async () => {
  const { client, upload, machine, upgrade, ended, outcomes } = await startUpgradeSystem();
  const bytes = await upload('9.0.0');
  const machines = [await machine('a'), await machine('b'), await machine('c')];
  const { id, waves, total } = await upgrade({ machine_ids: machines.map((one) => one.id), wave: '2' });
  expect([waves, total]).toEqual([2, 3]);
  const [a, b, c] = machines as [(typeof machines)[0], (typeof machines)[0], (typeof machines)[0]];
  const [first, second] = await Promise.all([a.next(), b.next()]);
  expect(first.upgradeId).toBe(id);
  expect(first.bytes.equals(bytes)).toBe(true);
  first.staged();
  first.busy(2);
  await expect
    .poll(async () => (await client.upgrades.machines({ upgrade_id: id, machine_id: a.id })).items[0])
    .toMatchObject({ status: 'busy', commands: 2, from_version: '0.0.0' });
  for (const one of [first, second]) one.switching();
  const last = { upgrade_id: id, from_version: '0.0.0', to_version: '9.0.0' };
  await a.back('9.0.0', { ...last, outcome: 'UPGRADE_OUTCOME_SUCCEEDED' });
  // Machine b is linked with the new version before its outcome is known.
  await b.back('9.0.0', { ...last, outcome: 'UPGRADE_OUTCOME_RUNNING' });
  await expect.poll(() => outcomes(id)).toEqual({ a: 'upgraded', b: 'switching', c: 'waiting' });
  b.agent.send({ heartbeat: { last_upgrade: { ...last, outcome: 'UPGRADE_OUTCOME_SUCCEEDED' } } });
  await c.upgrade();
  expect(await ended(id)).toMatchObject({ status: 'completed', current_wave: 2, counts: { upgraded: 3 } });
  const { items } = await client.events.list({ sort: 'created_at', limit: 100 });
  const steps = items.filter(({ type }) => type.startsWith('upgrade.'));
  expect(steps.map(({ type, data }) => [type, data.machine_name])).toEqual([
    ['upgrade.started', undefined],
    ['upgrade.wave_started', undefined],
    ['upgrade.machine_upgraded', 'a'],
    ['upgrade.machine_upgraded', 'b'],
    ['upgrade.wave_started', undefined],
    ['upgrade.machine_upgraded', 'c'],
    ['upgrade.finished', undefined],
  ]);
});

test('an upgrade stops once more machines have failed than allowed, and leaves the others as they are', async () => {
  const { upload, machine, upgrade, ended, outcomes } = await startUpgradeSystem();
  await upload('9.0.0');
  const [a, b, c, d] = [await machine('a'), await machine('b'), await machine('c'), await machine('d')];
  const machine_ids = [a, b, c, d].map(({ id }) => id);
  const { id } = await upgrade({ machine_ids, wave: '50%', max_failures: 1 });
  const refused = await b.next();
  await a.upgrade('ROLLED_BACK');
  refused.fail('validation_failed', 'wrong_signature');
  expect(await ended(id)).toMatchObject({ status: 'failed', current_wave: 1, next_wave_at: null });
  expect(await outcomes(id)).toEqual({
    a: 'failed: rolled_back',
    b: 'failed: refused',
    c: 'cancelled: max_failures',
    d: 'cancelled: max_failures',
  });
});

test('by default no machine starts after the first failure, and a waiting machine is cancelled', async () => {
  const { upload, machine, upgrade, ended, outcomes } = await startUpgradeSystem();
  await upload('9.0.0');
  const [a, b] = [await machine('a'), await machine('b')];
  const { id } = await upgrade({ machine_ids: [a.id, b.id], wave: '2' });
  const waiting = await b.next();
  waiting.busy(1);
  await a.upgrade('ROLLED_BACK');
  await waiting.cancelled;
  await ended(id);
  expect(await outcomes(id)).toEqual({ a: 'failed: rolled_back', b: 'cancelled: max_failures' });
});

test('machines that cannot be upgraded are skipped at once, each with its reason', async () => {
  const { client, upload, machine, upgrade, ended, outcomes, signing } = await startUpgradeSystem();
  await upload('9.0.0');
  const of = { kind: 'PACKAGE_KIND_TAR_GZ' as const, upgrade_unit: true, trusted_key: signing.fingerprint };
  const some = [
    await machine('current', { agent_version: '9.0.0' }),
    await machine('old', { installation: null }),
    await machine('by hand', { installation: { ...of, kind: 'PACKAGE_KIND_UNSPECIFIED' } }),
    await machine('no unit', { installation: { ...of, upgrade_unit: false } }),
    await machine('no key', { installation: { ...of, trusted_key: '' } }),
    await machine('other key', { installation: { ...of, trusted_key: makeSigner().fingerprint } }),
    await machine('owner', { installation: { ...of, hold_version: '0.0.0' } }),
    await machine('locked', { capabilities: ['metrics'] }),
    await machine('deb', { installation: { ...of, kind: 'PACKAGE_KIND_DEB' } }),
    await machine('held'),
    await machine('pinned'),
  ];
  const [held, pinned] = some.slice(-2).map(({ id }) => id);
  const { upgrade: policy } = await client.machines.update({ machine_id: held ?? '', agent_hold: true });
  expect(policy).toMatchObject({ hold: true, pin: null, possible: false });
  await client.machines.update({ machine_id: pinned ?? '', agent_pin: '8.0.0' });
  const { id } = await upgrade({ machine_ids: some.map((one) => one.id) });
  expect(await ended(id)).toMatchObject({ status: 'completed', waves: 0 });
  expect(await outcomes(id)).toEqual({
    current: 'skipped: current',
    old: 'skipped: not_supported',
    'by hand': 'skipped: not_supported',
    'no unit': 'skipped: not_supported',
    'no key': 'skipped: no_key',
    'other key': 'skipped: other_key',
    owner: 'skipped: held',
    locked: 'skipped: not_allowed',
    deb: 'skipped: no_package',
    held: 'skipped: held',
    pinned: 'skipped: pinned',
  });
  const listed = await client.machines.list({ include: 'agent_version,upgrade', search: 'pinned' });
  expect(listed.items[0]).toMatchObject({
    agent_version: '0.0.0',
    upgrade: { pin: '8.0.0', possible: false },
  });
  await client.machines.update({ machine_id: pinned ?? '', agent_pin: null });
  const detail = await client.machines.get({ machine_id: pinned ?? '', include: 'upgrade' });
  expect(detail.upgrade?.pin).toBeNull();
});

test('an offline machine delays no wave, and is upgraded when it is back or skipped at the end', async () => {
  const clock = leapingClock();
  const { upload, machine, upgrade, ended, outcomes } = await startUpgradeSystem();
  await upload('9.0.0');
  const [a, b, c] = [await machine('a'), await machine('b'), await machine('c')];
  a.leave();
  b.leave();
  const { id } = await upgrade({ machine_ids: [a, b, c].map((one) => one.id), wave: '1', queue_for: hour });
  await c.upgrade();
  await expect.poll(() => outcomes(id)).toEqual({ a: 'offline', b: 'offline', c: 'upgraded' });
  await a.back();
  await a.upgrade();
  clock.leap(hour + 1);
  expect(await ended(id)).toMatchObject({ status: 'completed' });
  expect(await outcomes(id)).toEqual({ a: 'upgraded', b: 'skipped: offline', c: 'upgraded' });
});

test('a machine that does not come back counts as failed until it reports that it was upgraded', async () => {
  const clock = leapingClock();
  const { upload, machine, upgrade, ended, outcomes } = await startUpgradeSystem();
  await upload('9.0.0');
  const a = await machine('a');
  const { id } = await upgrade({ machine_ids: [a.id] });
  await a.take();
  await expect.poll(() => outcomes(id)).toEqual({ a: 'switching' });
  a.leave();
  clock.leap(hour);
  expect(await ended(id)).toMatchObject({ status: 'failed' });
  expect(await outcomes(id)).toEqual({ a: 'failed: no_answer' });
  const last = { upgrade_id: id, from_version: '0.0.0', to_version: '9.0.0' };
  await a.back('9.0.0', { ...last, outcome: 'UPGRADE_OUTCOME_SUCCEEDED' });
  await expect.poll(() => outcomes(id)).toEqual({ a: 'upgraded' });
});

test('a package is sent again if the link was lost during the transfer, but not to a machine that has all of it', async () => {
  const { upload, machine, upgrade, ended, outcomes } = await startUpgradeSystem();
  await upload('9.0.0');
  const [a, b, c] = [await machine('a'), await machine('b'), await machine('c')];
  const { id } = await upgrade({ machine_ids: [a, b, c].map((one) => one.id), wave: '3' });
  await Promise.all([a.next(), b.next(), c.next()]);
  await a.back();
  // Machine b received the package, but the link was lost before its report of that arrived.
  const last = { upgrade_id: id, from_version: '0.0.0', to_version: '9.0.0' };
  await b.back('9.0.0', { ...last, outcome: 'UPGRADE_OUTCOME_SUCCEEDED' });
  // Machine c runs the new version, but whether the upgrade succeeds is not decided yet.
  await c.back('9.0.0', { ...last, outcome: 'UPGRADE_OUTCOME_RUNNING' });
  await a.upgrade();
  await expect.poll(() => outcomes(id)).toEqual({ a: 'upgraded', b: 'upgraded', c: 'switching' });
  c.agent.send({ heartbeat: { last_upgrade: { ...last, outcome: 'UPGRADE_OUTCOME_SUCCEEDED' } } });
  expect(await ended(id)).toMatchObject({ status: 'completed', counts: { upgraded: 3 } });
});

test('cancelling an upgrade leaves waiting machines unchanged, and lets a machine that switches finish', async () => {
  const { client, upload, machine, upgrade, ended, outcomes } = await startUpgradeSystem();
  await upload('9.0.0');
  const [a, b, c] = [await machine('a'), await machine('b'), await machine('c')];
  const { id } = await upgrade({ machine_ids: [a, b, c].map((one) => one.id), wave: '2' });
  const waiting = await b.next();
  waiting.busy(1);
  await a.take();
  await expect.poll(() => outcomes(id)).toMatchObject({ a: 'switching', b: 'busy' });
  expect(await client.upgrades.cancel({ upgrade_id: id })).toMatchObject({ status: 'cancelled' });
  await waiting.cancelled;
  const last = { upgrade_id: id, from_version: '0.0.0', to_version: '9.0.0' };
  await a.back('9.0.0', { ...last, outcome: 'UPGRADE_OUTCOME_SUCCEEDED' });
  expect(await ended(id)).toMatchObject({ status: 'cancelled' });
  expect(await outcomes(id)).toEqual({ a: 'upgraded', b: 'cancelled', c: 'cancelled' });
});

test('a machine that took the package before it learned of a cancel or a hold is recorded as what it reports', async () => {
  const { client, upload, machine, upgrade, ended, outcomes } = await startUpgradeSystem();
  await upload('9.0.0');
  await upload('9.0.1');
  const [a, b, c] = [await machine('a'), await machine('b'), await machine('c')];
  const { id } = await upgrade({ machine_ids: [a, b, c].map((one) => one.id), wave: '3' });
  const deliveries = await Promise.all([a.next(), b.next(), c.next()]);
  await client.machines.update({ machine_id: b.id, agent_hold: true });
  await client.upgrades.cancel({ upgrade_id: id });
  await Promise.all(deliveries.map(({ cancelled }) => cancelled));
  expect(await ended(id)).toMatchObject({ status: 'cancelled' });
  expect(await outcomes(id)).toEqual({ a: 'cancelled', b: 'skipped: held', c: 'cancelled' });
  // Machine a reports while another upgrade of it runs.
  await upgrade({ machine_ids: [a.id], version: '9.0.1' });
  await a.next();
  const last = { upgrade_id: id, from_version: '0.0.0', to_version: '9.0.0' };
  a.agent.send({ heartbeat: { last_upgrade: { ...last, outcome: 'UPGRADE_OUTCOME_SUCCEEDED' } } });
  await b.back('9.0.0', { ...last, outcome: 'UPGRADE_OUTCOME_SUCCEEDED' });
  await c.back('0.0.0', { ...last, outcome: 'UPGRADE_OUTCOME_ROLLED_BACK' });
  await expect.poll(() => outcomes(id)).toEqual({ a: 'upgraded', b: 'upgraded', c: 'failed: rolled_back' });
  const { items } = await client.events.list({ sort: 'created_at', limit: 100 });
  const steps = items.filter(({ data }) => data.upgrade_id === id).map(({ type }) => type);
  expect(steps.slice(2).sort()).toEqual([
    'upgrade.finished',
    'upgrade.machine_failed',
    'upgrade.machine_upgraded',
    'upgrade.machine_upgraded',
  ]);
});

test('a machine that has the package and waits is not upgraded after a hold, a pin or a revoked key', async () => {
  const { client, call, upload, machine, upgrade, ended, outcomes } = await startUpgradeSystem();
  await upload('9.0.0');
  const [a, b, c, d] = [await machine('a'), await machine('b'), await machine('c'), await machine('d')];
  const deliver = async (one: typeof a) => {
    const delivery = await one.next();
    delivery.staged();
    delivery.busy(1);
    return delivery;
  };
  const { id } = await upgrade({ machine_ids: [a.id, b.id, d.id], wave: '3', max_failures: 1 });
  const owner = await client.keys.create({ name: 'owner', scopes: ['machines:write'] });
  const body = { machine_ids: [c.id], version: '9.0.0' };
  const { id: other } = (await call('POST', '/machines/upgrade', { key: owner.key, body })).body.data;
  const [ofA, ofB, ofC, ofD] = await Promise.all([a, b, c, d].map(deliver));
  await expect.poll(() => outcomes(id)).toEqual({ a: 'busy', b: 'busy', d: 'busy' });
  await expect.poll(() => outcomes(other)).toEqual({ c: 'busy' });
  await client.machines.update({ machine_id: a.id, agent_hold: true });
  await client.machines.update({ machine_id: b.id, agent_pin: '8.0.0' });
  await client.machines.update({ machine_id: d.id, agent_pin: '9.0.0' });
  await client.keys.remove({ key_id: owner.id });
  await Promise.all([ofA?.cancelled, ofB?.cancelled, ofC?.cancelled]);
  await ended(other);
  expect(await outcomes(other)).toEqual({ c: 'skipped: not_permitted' });
  await expect.poll(() => outcomes(id)).toEqual({ a: 'skipped: held', b: 'skipped: pinned', d: 'busy' });
  ofD?.switching();
  await expect.poll(() => outcomes(id)).toMatchObject({ d: 'switching' });
});

test('a machine is in one open upgrade at most', async () => {
  const { client, upload, machine, upgrade, outcomes } = await startUpgradeSystem();
  await upload('9.0.0');
  const a = await machine('a');
  const first = await upgrade({ machine_ids: [a.id] });
  await a.next();
  const second = await upgrade({ machine_ids: [a.id] });
  expect(await outcomes(second.id)).toEqual({ a: 'skipped: in_other_upgrade' });
  await client.upgrades.cancel({ upgrade_id: first.id });
});

test('a machine whose upgrade was cancelled while it was offline is upgraded by the next one', async () => {
  const { client, upload, machine, upgrade, ended, outcomes } = await startUpgradeSystem();
  await upload('9.0.0');
  const a = await machine('a');
  a.leave();
  const first = await upgrade({ machine_ids: [a.id] });
  await expect.poll(() => outcomes(first.id)).toEqual({ a: 'offline' });
  await client.upgrades.cancel({ upgrade_id: first.id });
  const second = await upgrade({ machine_ids: [a.id] });
  await expect.poll(() => outcomes(second.id)).toEqual({ a: 'offline' });
  await a.back();
  await a.upgrade();
  expect(await ended(second.id)).toMatchObject({ status: 'completed' });
  expect(await outcomes(first.id)).toEqual({ a: 'cancelled' });
});

test('a limited key upgrades and sees only its machines, and cannot cancel an upgrade with others', async () => {
  const { client, keyed, upload, machine, upgrade } = await startUpgradeSystem();
  await upload('9.0.0');
  const [a, b] = [await machine('a'), await machine('b')];
  for (const one of [a, b]) await client.machines.update({ machine_id: one.id, tags: ['web'] });
  const limits = { machine_ids: [a.id] };
  const { client: limited } = await keyed(['machines:read', 'machines:write'], limits);
  const both = await upgrade({ machine_ids: [a.id, b.id] });
  expect(await limited.upgrades.get({ upgrade_id: both.id })).toMatchObject({ total: 1 });
  expect((await limited.upgrades.machines({ upgrade_id: both.id })).total).toBe(1);
  // The number of the wave would reveal that there are machines in earlier waves.
  const waves = { current_wave: null, waves: null, next_wave_at: null };
  expect(await limited.upgrades.get({ upgrade_id: both.id })).toMatchObject(waves);
  expect((await limited.upgrades.list()).items).toMatchObject([waves]);
  expect((await limited.upgrades.machines({ upgrade_id: both.id })).items).toMatchObject([{ wave: null }]);
  await expect(limited.upgrades.cancel({ upgrade_id: both.id })).rejects.toMatchObject({ code: 'forbidden' });
  await client.upgrades.cancel({ upgrade_id: both.id });
  const foreign = await upgrade({ machine_ids: [b.id] });
  await expect(limited.upgrades.get({ upgrade_id: foreign.id })).rejects.toMatchObject({ code: 'forbidden' });
  expect((await limited.upgrades.list()).items.map(({ id }) => id)).toEqual([both.id]);
  await client.upgrades.cancel({ upgrade_id: foreign.id });
  const own = await limited.upgrades.create({ tags: ['web'], version: '9.0.0' });
  expect(own).toMatchObject({ total: 1, waves: 1 });
  expect((await limited.upgrades.machines({ upgrade_id: own.id })).items).toMatchObject([{ wave: 1 }]);
  const events = (await limited.events.list({ limit: 100 })).items;
  expect(events.filter(({ data }) => 'waves' in data)).toEqual([]);
  await expect(limited.upgrades.create({ machine_ids: [b.id] })).rejects.toMatchObject({ code: 'forbidden' });
  await expect(
    limited.packages.upload({ package: 'x', signature: 'x', content: Buffer.alloc(1) }),
  ).rejects.toMatchObject({ code: 'forbidden' });
});

test('after a restart of the broker an upgrade goes on, and machines report their outcome', async () => {
  const clock = leapingClock();
  const first = await startUpgradeSystem();
  await first.upload('9.0.0');
  const [a, b, c] = [await first.machine('a'), await first.machine('b'), await first.machine('c')];
  const { id } = await first.upgrade({ machine_ids: [a, b, c].map((one) => one.id), wave: '2' });
  await a.take();
  const waiting = await b.next();
  waiting.busy(1);
  await expect.poll(() => first.outcomes(id)).toEqual({ a: 'switching', b: 'busy', c: 'waiting' });
  for (const one of [a, b, c]) one.leave();
  await first.broker.close();
  clock.leap(hour);
  const { grpc, url } = first;
  const flags = ['--http', new URL(url).host, '--grpc', grpc];
  const second = await startUpgradeSystem({ dataDir: first.dataDir, flags });
  const last = { upgrade_id: id, from_version: '0.0.0', to_version: '9.0.0' };
  await a.back('9.0.0', { ...last, outcome: 'UPGRADE_OUTCOME_SUCCEEDED' });
  await b.back();
  await b.upgrade();
  await c.back();
  await c.upgrade();
  expect(await second.ended(id)).toMatchObject({ status: 'completed', counts: { upgraded: 3 } });
});

test('a machine whose transfers are all busy is sent the package again', async () => {
  const clock = leapingClock();
  const system = await startUpgradeSystem({ tuning: { link: { openCalls: 1 } } });
  const { client, upload, machine, upgrade, ended, outcomes } = system;
  await upload('9.0.0');
  const [a, b] = [await machine('a'), await machine('b')];
  const gone = new AbortController();
  const reading = client.files
    .download({ machine_id: a.id, path: '/a' }, { signal: gone.signal })
    .catch(() => undefined);
  const stream = a.agent.answer((await a.agent.nextCallOf('ReadFile')).call_id);
  const entry = { name: Buffer.from('a'), path: Buffer.from('/a'), size: 10 };
  stream.write({ message: a.agent.encode('ReadFile', { head: { entry, etag: '"1"', length: 10 } }) });
  const { id } = await upgrade({ machine_ids: [a.id, b.id], wave: '1' });
  await expect.poll(() => outcomes(id)).toEqual({ a: 'staging', b: 'waiting' });
  // The package waits 10 s for the download, and is then refused as unavailable.
  clock.leap(10_001);
  expect(await outcomes(id)).toEqual({ a: 'staging', b: 'waiting' });
  gone.abort();
  await reading;
  const upgraded = Promise.all([a.upgrade(), b.upgrade()]);
  await waitFor(async () => {
    clock.leap(1_000);
    expect((await client.upgrades.get({ upgrade_id: id })).status).toBe('completed');
  });
  await upgraded;
  expect([(await ended(id)).status, await outcomes(id)]).toEqual([
    'completed',
    { a: 'upgraded', b: 'upgraded' },
  ]);
});

test('a machine that vanished silently does not stop the upgrade before its link has ended', async () => {
  const clock = leapingClock();
  const { client, upload, machine, upgrade, outcomes } = await startUpgradeSystem();
  await upload('9.0.0');
  const [a, b] = [await machine('a'), await machine('b')];
  const { id } = await upgrade({ machine_ids: [a.id, b.id], wave: '1' });
  await a.agent.nextCallOf('StageUpgrade');
  // The broker waits 10 s for an answer, and then cancels the call.
  clock.leap(10_001);
  await a.agent.next('cancel');
  expect([(await client.upgrades.get({ upgrade_id: id })).status, await outcomes(id)]).toEqual([
    'running',
    { a: 'staging', b: 'waiting' },
  ]);
});

// farhand machines upgrade, pin and hold, farhand upgrades and farhand packages, with scripted machines.
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { createLine } from '../cli-fixture.ts';
import { packageOf, startUpgradeSystem } from '../upgrades-fixture.ts';

test('packages are uploaded with the signature beside them, listed and deleted', async () => {
  const system = await startUpgradeSystem();
  const farhand = createLine(system);
  const { file, bytes, signature } = packageOf('9.0.0', system.signing);
  writeFileSync(join(farhand.home, file), bytes);
  const unsigned = await farhand('packages upload', [file]);
  expect([unsigned.code, unsigned.err]).toEqual([1, expect.stringContaining(`${file}.sig`)]);
  writeFileSync(join(farhand.home, `${file}.sig`), signature);
  expect((await farhand('packages upload', [file])).out).toContain(system.signing.fingerprint);
  expect((await farhand('packages list')).out).toMatch(new RegExp(`^${file} +9.0.0 +x64 +tar.gz +`, 'm'));
  expect(await farhand.json('packages delete', [file, '--yes'])).toEqual({ deleted: true });
});

test('machines upgrade prints its progress, and after a failure prints the message and exits with 1', async () => {
  const system = await startUpgradeSystem();
  const farhand = createLine(system);
  await system.upload('9.0.0');
  const [a, b] = [await system.machine('web-1'), await system.machine('web-2')];
  for (const { id } of [a, b]) await system.client.machines.update({ machine_id: id, tags: ['web'] });
  const flags = ['--to', '9.0.0', '--pause', '0s', '--wave', '50%', '--max-failures', '1'];
  expect((await farhand('machines upgrade', ['web-1', '--tags', 'web'])).code).toBe(2);
  const running = farhand.start('machines upgrade', ['--tags', 'web', ...flags]);
  await a.upgrade();
  await running.says(/wave 2 of 2: 1 (staging|waiting), 1 upgraded/);
  await b.upgrade('ROLLED_BACK');
  const { code, out } = await running.ended;
  expect([code, out]).toEqual([
    1,
    expect.stringMatching(/^failed: web-2: the new version did not work.*: it did not link$/m),
  ]);
  const { items } = await system.client.upgrades.list();
  const id = items[0]?.id ?? '';
  expect((await farhand('upgrades list')).out).toMatch(
    new RegExp(`^${id} +failed +9.0.0 +2 of 2 +1 upgraded, 1 failed`, 'm'),
  );
  expect((await farhand('upgrades get', [id])).out).toMatch(/^machines +1 upgraded, 1 failed$/m);
  expect((await farhand('upgrades machines', [id, '--status', 'failed'])).out).toMatch(
    /^web-2 +2 +failed +rolled_back/m,
  );
});

test('a signal ends only the verb machines upgrade; the verb upgrades cancel ends the upgrade itself', async () => {
  const system = await startUpgradeSystem();
  const farhand = createLine(system);
  await system.upload('9.0.0');
  const a = await system.machine('web-1');
  const running = farhand.start('machines upgrade', ['web-1', '--to', '9.0.0']);
  const delivery = await a.next();
  delivery.busy(1);
  await running.says(/1 busy/);
  running.child.kill('SIGINT');
  const { code, err } = await running.ended;
  expect([code, err]).toEqual([130, expect.stringMatching(/goes on; .*farhand upgrades cancel upg_\w+/)]);
  const [id = ''] = /upg_\w+/.exec(err) ?? [];
  expect((await farhand('upgrades cancel', [id])).out).toMatch(/^status +cancelled$/m);
  await delivery.cancelled;
});

test('packages upload names the file that is missing: the package, or its signature', async () => {
  const farhand = createLine(await startUpgradeSystem());
  expect((await farhand('packages upload', ['gone.tar.gz'])).err).toMatch(/^farhand: gone.tar.gz: does not/);
  writeFileSync(join(farhand.home, 'agent.tar.gz'), '');
  expect((await farhand('packages upload', ['agent.tar.gz'])).err).toMatch(/is not signed: .*--sign-key/);
});

test('machines pin and hold decide what upgrades may install, and --detach prints only the id', async () => {
  const system = await startUpgradeSystem();
  const farhand = createLine(system);
  await system.upload('9.0.0');
  await system.machine('web-1');
  expect((await farhand.json('machines pin', ['web-1', '8.0.0'])).upgrade.pin).toBe('8.0.0');
  expect((await farhand.json('machines hold', ['web-1'])).upgrade).toMatchObject({
    pin: '8.0.0',
    hold: true,
  });
  const { out } = await farhand('machines upgrade', ['web-1', '--to', '9.0.0', '--detach']);
  expect(await system.ended(out.trim())).toMatchObject({ status: 'completed', counts: { skipped: 1 } });
  expect((await farhand('upgrades get', [out.trim()])).out).toMatch(/^skipped: web-1: .*on hold/m);
  expect((await farhand.json('machines hold', ['web-1', '--release'])).upgrade.hold).toBe(false);
  expect((await farhand.json('machines pin', ['web-1', 'any'])).upgrade.pin).toBeNull();
});

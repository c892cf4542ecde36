// Upgrades on two brokers that share a database.
import { expect, test } from 'vitest';
import { shared } from '../close-after-tests.ts';
import { linkScripted } from '../scripted-agent.ts';
import { packageOf, signingKey, upgradesOf } from '../upgrades-fixture.ts';
import { createServer, startTwo, withPostgres } from './postgres-fixture.ts';

const server = shared(() => createServer());

withPostgres('two upgrades at once', () => {
  test('are both accepted, and each machine is in one of them', async () => {
    const { one, two } = await startTwo(await server());
    const key = signingKey();
    const { file, bytes, signature } = packageOf('9.0.0', key);
    for (const { client } of [one, two])
      await client.packages.upload({ package: file, signature, content: bytes });
    const { machine } = upgradesOf(one, key);
    const machine_ids: string[] = [];
    for (let n = 0; n < 10; n += 1) machine_ids.push((await machine(`m${n}`)).id);
    for (let round = 0; round < 4; round += 1) {
      const made = await Promise.all(
        [one, two].map(({ client }) => client.upgrades.create({ machine_ids, version: '9.0.0', wave: '1' })),
      );
      for (const { id } of made) await one.client.upgrades.cancel({ upgrade_id: id });
      const members = await Promise.all(
        made.map(({ id }) => one.client.upgrades.machines({ upgrade_id: id, limit: 100 })),
      );
      const taking = members.flatMap(({ items }) =>
        items.filter(({ reason }) => reason !== 'in_other_upgrade').map(({ machine_id }) => machine_id),
      );
      expect(taking.sort()).toEqual(machine_ids.toSorted());
    }
  });
});

withPostgres('a machine that took the package before it learned of the cancel', () => {
  test('is recorded as upgraded once it reports that to another broker', async () => {
    const { one, two } = await startTwo(await server());
    const key = signingKey();
    const { file, bytes, signature } = packageOf('9.0.0', key);
    await one.client.packages.upload({ package: file, signature, content: bytes });
    const { machine, upgrade, ended } = upgradesOf(one, key);
    const a = await machine('a');
    const { id: upgrade_id } = await upgrade({ machine_ids: [a.id] });
    const { cancelled } = await a.next();
    await one.client.upgrades.cancel({ upgrade_id });
    await cancelled;
    expect(await ended(upgrade_id)).toMatchObject({ counts: { cancelled: 1 } });
    a.leave();
    const last = { upgrade_id, outcome: 'UPGRADE_OUTCOME_SUCCEEDED' as const, to_version: '9.0.0' };
    await linkScripted(two.grpc, a.agent.identity, {
      agent_version: '9.0.0',
      installation: { kind: 'PACKAGE_KIND_TAR_GZ', upgrade_unit: true, last_upgrade: last },
    });
    await expect
      .poll(async () => (await one.client.upgrades.get({ upgrade_id })).counts)
      .toMatchObject({ upgraded: 1, cancelled: 0 });
  });
});

withPostgres('a wave whose machines could not be read when it began', () => {
  test('goes on once they can be read', async () => {
    const { one, two, query } = await startTwo(await server());
    const key = signingKey();
    const { file, bytes, signature } = packageOf('9.0.0', key);
    for (const { client } of [one, two])
      await client.packages.upload({ package: file, signature, content: bytes });
    const [a, b] = [await upgradesOf(one, key).machine('a'), await upgradesOf(two, key).machine('b')];
    const { upgrade, ended } = upgradesOf(one, key);
    const { id } = await upgrade({ machine_ids: [a.id, b.id], wave: '1', pause: 3_600_000 });
    await a.upgrade();
    await expect
      .poll(async () => (await two.client.upgrades.get({ upgrade_id: id })).next_wave_at)
      .not.toBeNull();
    await query(
      `BEGIN; ALTER TABLE upgrade_machines RENAME TO unreadable;
       UPDATE upgrades SET current_wave = 2, next_wave_at = NULL; COMMIT`,
    );
    await expect.poll(() => two.log.join('')).toContain('upgrade_machines');
    await query('ALTER TABLE unreadable RENAME TO upgrade_machines');
    await b.upgrade();
    expect(await ended(id)).toMatchObject({ status: 'completed', counts: { upgraded: 2 } });
  }, 60_000);
});

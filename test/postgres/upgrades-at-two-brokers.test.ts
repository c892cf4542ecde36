// Upgrades of the same machines that are requested at two brokers at once.
import { expect, test } from 'vitest';
import { shared } from '../close-after-tests.ts';
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

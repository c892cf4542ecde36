// farhand broker state accept: the way back to a broker that starts for people who edited state.json by hand.
import { spawnSync } from 'node:child_process';
import { existsSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { openHouse, temporaryFolder } from '../house.ts';
import { shippedProgram } from '../shipped.ts';

const fileIn = (folder: string): string => join(folder, 'state.json');
const textIn = (folder: string): string => readFileSync(fileIn(folder), 'utf8');

const main = shippedProgram('farhand');

function accept(dataDir: string) {
  const args = [main, 'broker', 'state', 'accept', '--data-dir', dataDir];
  return spawnSync(process.execPath, args, { encoding: 'utf8', env: { PATH: process.env.PATH } });
}

test('state accept refuses a broker that runs, a folder without one, and a file that holds no state', async () => {
  const house = await openHouse();
  const edited = textIn(house.dataDir).replace('"version":2', '"version":"2"');
  expect(accept(house.dataDir)).toMatchObject({
    status: 1,
    stderr: expect.stringContaining('already uses'),
  });
  await house.broker.close();
  writeFileSync(fileIn(house.dataDir), edited);
  const refused = accept(house.dataDir);
  expect([refused.status, refused.stdout]).toEqual([1, '']);
  expect(refused.stderr).toContain('does not hold a broker');
  expect(textIn(house.dataDir)).toBe(edited);
  const empty = temporaryFolder('empty');
  expect(accept(empty)).toMatchObject({
    status: 78,
    stderr: expect.stringContaining('does not contain a broker'),
  });
}, 60_000);

test('state accept makes a broker start with a state.json that was edited by hand', async () => {
  const house = await openHouse();
  const { id: key_id } = await house.client.keys.create({ name: 'before', scopes: ['files:read'] });
  await house.broker.close();
  writeFileSync(fileIn(house.dataDir), textIn(house.dataDir).replace('"before"', '"after"'));
  await expect(openHouse({ dataDir: house.dataDir })).rejects.toThrow('farhand broker state accept');
  const { status, stdout, stderr } = accept(house.dataDir);
  expect([status, stderr]).toEqual([0, '']);
  expect(stdout).toContain(`${fileIn(house.dataDir)} is accepted`);
  expect(statSync(fileIn(house.dataDir)).mode & 0o777).toBe(0o600);
  expect(existsSync(join(house.dataDir, 'broker.sock'))).toBe(false);
  const { client } = await openHouse({ dataDir: house.dataDir });
  const { items } = await client.keys.list();
  expect(items.find(({ id }) => id === key_id)?.name).toBe('after');
}, 60_000);

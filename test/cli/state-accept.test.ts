// farhand broker state accept: makes a broker start again after state.json was edited by hand.
import { spawnSync } from 'node:child_process';
import { existsSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { shippedProgram } from '../bundled-programs.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';

const fileIn = (folder: string): string => join(folder, 'state.json');
const textIn = (folder: string): string => readFileSync(fileIn(folder), 'utf8');

const main = shippedProgram('farhand');

function accept(dataDir: string) {
  const args = [main, 'broker', 'state', 'accept', '--data-dir', dataDir];
  return spawnSync(process.execPath, args, { encoding: 'utf8', env: { PATH: process.env.PATH } });
}

test('state accept refuses a running broker, a folder without a broker’s data, and an invalid state', async () => {
  const system = await startFarhand();
  const edited = textIn(system.dataDir).replace('"version":2', '"version":"2"');
  expect(accept(system.dataDir)).toMatchObject({
    status: 1,
    stderr: expect.stringContaining('already uses'),
  });
  await system.broker.close();
  writeFileSync(fileIn(system.dataDir), edited);
  const refused = accept(system.dataDir);
  expect([refused.status, refused.stdout]).toEqual([1, '']);
  expect(refused.stderr).toContain('does not contain a broker');
  expect(textIn(system.dataDir)).toBe(edited);
  const empty = temporaryFolder('empty');
  expect(accept(empty)).toMatchObject({
    status: 78,
    stderr: expect.stringContaining('does not contain a broker'),
  });
});

test('state accept names line and column of an error in the JSON', async () => {
  const system = await startFarhand();
  await system.broker.close();
  const edited = textIn(system.dataDir).replace('"version":2,', '\n"version":2,,');
  writeFileSync(fileIn(system.dataDir), edited);
  const { status, stderr } = accept(system.dataDir);
  expect(status).not.toBe(0);
  expect(stderr).toMatch(/state\.json is damaged: .*\(line 2 column 13\); /);
  expect(textIn(system.dataDir)).toBe(edited);
});

test('state accept makes a broker start with a state.json that was edited by hand', async () => {
  const system = await startFarhand();
  const { id: key_id } = await system.client.keys.create({ name: 'before', scopes: ['files:read'] });
  await system.broker.close();
  writeFileSync(fileIn(system.dataDir), textIn(system.dataDir).replace('"before"', '"after"'));
  await expect(startFarhand({ dataDir: system.dataDir })).rejects.toThrow('farhand broker state accept');
  const { status, stdout, stderr } = accept(system.dataDir);
  expect([status, stderr]).toEqual([0, '']);
  expect(stdout).toContain(`${fileIn(system.dataDir)} is accepted`);
  expect(statSync(fileIn(system.dataDir)).mode & 0o777).toBe(0o600);
  expect(existsSync(join(system.dataDir, 'broker.sock'))).toBe(false);
  const { client } = await startFarhand({ dataDir: system.dataDir });
  const { items } = await client.keys.list();
  expect(items.find(({ id }) => id === key_id)?.name).toBe('after');
});

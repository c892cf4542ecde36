// Copies from one machine to another, streamed through the broker and checked by a digest. A failed copy leaves nothing
// behind.
import { execFileSync } from 'node:child_process';
import { createHash, randomBytes } from 'node:crypto';
import { mkdirSync, readdirSync, readFileSync, statSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { scriptedMachine } from './scripted-agent.ts';
import { startFarhand, temporaryFolder } from './start-farhand.ts';

async function twoMachines() {
  const system = await startFarhand();
  const here = (await system.agent({ name: 'here' })).machineId;
  const there = (await system.agent({ name: 'there' })).machineId;
  const folder = temporaryFolder('copies');
  mkdirSync(join(folder, 'to'));
  const copy = (source: string, destination: string, more = {}) =>
    system.client.files.copy({
      machine_id: here,
      destination_machine_id: there,
      source: join(folder, source),
      destination: join(folder, 'to', destination),
      ...more,
    });
  return { system, here, there, folder, copy };
}

test('a copy that cannot be made leaves nothing at the destination', async () => {
  const { folder, copy } = await twoMachines();
  writeFileSync(join(folder, 'file'), 'new');
  mkdirSync(join(folder, 'dir'));
  writeFileSync(join(folder, 'dir/a'), 'x');
  writeFileSync(join(folder, 'to/file'), 'old');
  mkdirSync(join(folder, 'to/full/below'), { recursive: true });
  for (const [source, destination, more, code] of [
    ['none', 'x', {}, 'file_not_found'],
    ['file', 'file', {}, 'already_exists'],
    ['file', 'full', { overwrite: true }, 'is_a_directory'],
    ['dir', 'file', {}, 'already_exists'],
    ['dir', 'full', {}, 'already_exists'],
    ['dir', 'full', { overwrite: true }, 'directory_not_empty'],
    ['file', 'none/x', {}, 'file_not_found'],
    ['dir', 'none/x', {}, 'file_not_found'],
  ] as const) {
    expect([source, destination, await copy(source, destination, more).catch((error) => error.code)]).toEqual(
      [source, destination, code],
    );
  }
  expect(readdirSync(join(folder, 'to')).sort()).toEqual(['file', 'full']);
  expect(readFileSync(join(folder, 'to/file'), 'utf8')).toBe('old');
});

test('a byte that changes in transit is detected by the sender’s digest, and nothing is written', async () => {
  const system = await startFarhand();
  const there = (await system.agent()).machineId;
  const liar = await scriptedMachine(system);
  const folder = temporaryFolder('liar');
  const copying = system.client.files.copy({
    machine_id: liar.identity.machineId,
    destination_machine_id: there,
    source: '/a',
    destination: join(folder, 'a'),
  });
  const entry = {
    name: Buffer.from('a'),
    path: Buffer.from('/a'),
    size: 3,
    type: 'FILE_TYPE_FILE',
    mode: 0o644,
  };
  const stat = await liar.next('call');
  liar.send({ reply: { call_id: stat.call_id, response: liar.encode('StatFile', { entry, etag: '"1"' }) } });
  const sha256 = createHash('sha256').update('abd').digest('hex');
  const head = { entry, etag: '"1"', length: 3 };
  liar.answerWith(
    await liar.nextCallOf('ReadFile'),
    { head },
    { chunk: Buffer.from('abc') },
    { tail: { sha256 } },
  );
  await expect(copying).rejects.toMatchObject({ code: 'validation_failed' });
  expect(readdirSync(folder)).toEqual([]);
});

test('a copy has the mode of the file that was read, if that file has replaced the one before', async () => {
  const system = await startFarhand();
  const there = (await system.agent()).machineId;
  const sender = await scriptedMachine(system);
  const folder = temporaryFolder('replaced');
  const copying = system.client.files.copy({
    machine_id: sender.identity.machineId,
    destination_machine_id: there,
    source: '/a',
    destination: join(folder, 'a'),
  });
  const entry = { name: Buffer.from('a'), path: Buffer.from('/a'), size: 3, type: 'FILE_TYPE_FILE' };
  const { call_id } = await sender.next('call');
  const replaced = { entry: { ...entry, mode: 0o644 }, etag: '"1"' };
  sender.send({ reply: { call_id, response: sender.encode('StatFile', replaced) } });
  const sha256 = createHash('sha256').update('abc').digest('hex');
  sender.answerWith(
    await sender.nextCallOf('ReadFile'),
    { head: { entry: { ...entry, mode: 0o4600 }, etag: '"2"', length: 3 } },
    { chunk: Buffer.from('abc') },
    { tail: { sha256 } },
  );
  await copying;
  expect(statSync(join(folder, 'a')).mode & 0o7777).toBe(0o600);
});

test('a key that may not use the other machine gets the same refusal whether it exists or not', async () => {
  const { system, here, there, folder } = await twoMachines();
  writeFileSync(join(folder, 'file'), 'x');
  const { client } = await system.keyed(['files:read', 'files:write'], { machine_ids: [here] });
  for (const destination_machine_id of [there, 'mach_0000000000000000000000']) {
    const body = {
      machine_id: here,
      destination_machine_id,
      source: join(folder, 'file'),
      destination: '/x',
    };
    await expect(client.files.copy(body)).rejects.toMatchObject({ status: 403, code: 'forbidden' });
  }
});

test('a copied file has the bytes and mode of the original, and an event reports it as uploaded', async () => {
  const { system, there, folder, copy } = await twoMachines();
  const content = randomBytes(3_000_001);
  writeFileSync(join(folder, 'file'), content, { mode: 0o640 });
  const copied = await copy('file', 'file');
  expect(copied).toMatchObject({
    path: join(folder, 'to/file'),
    size: content.length,
    mode: '0640',
    files_copied: 1,
    bytes_copied: content.length,
  });
  expect(readFileSync(join(folder, 'to/file')).equals(content)).toBe(true);
  const { items } = await system.client.events.list({ type: 'file.uploaded' });
  expect(items[0]?.data).toMatchObject({
    machine_id: there,
    path: join(folder, 'to/file'),
    size: content.length,
  });
  writeFileSync(join(folder, 'file'), 'again');
  await copy('file', 'file', { overwrite: true });
  expect(readFileSync(join(folder, 'to/file'), 'utf8')).toBe('again');
});

test('a directory is copied completely: names of any bytes, symlinks, empty directories, modes and times', async () => {
  const { folder, copy } = await twoMachines();
  const tree = join(folder, 'tree');
  mkdirSync(join(tree, 'a/empty'), { recursive: true });
  for (let n = 0; n < 300; n += 1) writeFileSync(join(tree, `a/f${n}`), randomBytes(n));
  writeFileSync(Buffer.from(`${tree}/\xff\xfe`, 'latin1'), 'bytes', { mode: 0o600 });
  symlinkSync('a/f1', join(tree, 'link'));
  const copied = await copy('tree', 'tree');
  expect(copied).toMatchObject({ type: 'directory', files_copied: 301, bytes_copied: (299 * 300) / 2 + 5 });
  expect(execFileSync('diff', ['-r', '--no-dereference', tree, join(folder, 'to/tree')]).toString()).toBe('');
  expect(statSync(Buffer.from(`${folder}/to/tree/\xff\xfe`, 'latin1')).mode & 0o777).toBe(0o600);
  expect(readdirSync(join(folder, 'to'))).toEqual(['tree']);
});

// The start of an agent: refusals before it joins, what a failed start releases, and how a machine joins again.
import {
  chownSync,
  closeSync,
  existsSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { agentSettings } from '../../agent/settings-schema.ts';
import { startAgent } from '../../agent/start.ts';
import { brokerSettings } from '../../broker/settings-schema.ts';
import { startBroker } from '../../broker/start/index.ts';
import { takeDirectory } from '../../shared/directory-lock.ts';
import { readSettings } from '../../shared/read-settings.ts';
import { quiet, startFarhand, temporaryFolder } from '../start-farhand.ts';
import { program } from '../start-processes.ts';

const start = (...argv: string[]) => startAgent(readSettings(agentSettings, { argv, env: {} }), quiet);

test('a missing root is refused before the join token is used up', async () => {
  const system = await startFarhand();
  const token = await system.joinToken();
  const dataDir = temporaryFolder('agent');
  const where = ['--broker', system.grpc, '--join-token', token, '--data-dir', dataDir];
  await expect(start(...where, '--root', `${dataDir}/none`)).rejects.toMatchObject({
    name: 'StartError',
    exitCode: 78,
    message: expect.stringContaining(`${dataDir}/none`),
  });
  expect((await system.client.machines.list({})).items).toEqual([]);
  await system.agent({ dataDir, joinToken: token, flags: ['--root', dataDir] });
});

test('an agent starts although the file with its join token cannot be removed', async () => {
  const system = await startFarhand();
  const folder = temporaryFolder('token');
  const token = join(folder, 'token');
  writeFileSync(token, await system.joinToken());
  const file = openSync(token, 'r');
  onTestFinished(() => closeSync(file));
  const where = ['--broker', system.grpc, '--data-dir', join(folder, 'agent')];
  // No name in this directory can be removed, not even by root.
  const agent = await start(...where, '--join-token-file', `/proc/self/fd/${file}`);
  await agent.close();
});

test.each(['processes', 'temporary.journal'])(
  'a start that fails at %s releases everything',
  async (name) => {
    const system = await startFarhand();
    const { dataDir, close } = await system.agent();
    await close();
    const place = join(dataDir, name);
    rmSync(place, { recursive: true, force: true });
    if (name === 'processes') writeFileSync(place, '');
    else mkdirSync(place);
    const where = ['--broker', system.grpc, '--data-dir', dataDir];
    for (const _ of [1, 2]) await expect(start(...where)).rejects.toMatchObject({ code: /E\w+/ });
    rmSync(place, { recursive: true });
    await system.agent({ dataDir });
  },
);

test('a lock works on a full disk, and an error of its file is not reported as the lock of another process', () => {
  const dataDir = temporaryFolder('locked');
  const unlock = takeDirectory(dataDir, 'agent');
  expect(readdirSync(dataDir)).toEqual(['lock.db']);
  expect(statSync(join(dataDir, 'lock.db')).size).toBe(0);
  unlock();
  writeFileSync(join(dataDir, 'lock.db'), 'no database'.repeat(100));
  expect(() => takeDirectory(dataDir, 'agent')).toThrow('lock.db cannot be locked (file is not a database)');
});

test.skipIf(process.getuid?.() !== 0)(
  'root gets an error that names how to start on a directory of another user',
  async () => {
    const dataDir = temporaryFolder('foreign');
    chownSync(dataDir, 1, 1);
    const refusal = { name: 'StartError', exitCode: 78, message: expect.stringMatching(/runuser -u \w+ --/) };
    await expect(start('--broker', '127.0.0.1:1', '--data-dir', dataDir)).rejects.toMatchObject(refusal);
    const argv = ['--local', '--data-dir', dataDir];
    const broker = startBroker(readSettings(brokerSettings, { argv, env: {} }), quiet);
    await expect(broker).rejects.toMatchObject(refusal);
    expect(readdirSync(dataDir)).toEqual([]);
  },
);

test('a removed machine joins again with a new token, but not with the one that it used before', async () => {
  const system = await startFarhand();
  const { token } = await system.client.joinTokens.create({ uses: 5 });
  const first = await system.agent({ joinToken: token });
  const { dataDir, machineId } = first;
  await system.client.commands.create({ machine_id: machineId, command: 'true' });
  await system.client.machines.remove({ machine_id: machineId });
  await expect(first.ended).rejects.toThrow('a new join token');
  await expect(system.agent({ dataDir, joinToken: token })).rejects.toThrow(
    /has removed this machine .* backup from before it joined was restored.* a new join token and the same data directory/,
  );
  const log = readFileSync(join(dataDir, 'activity.log'), 'utf8');
  const second = await system.agent({ dataDir });
  expect(second.machineId).not.toBe(machineId);
  expect(readFileSync(join(dataDir, 'activity.log'), 'utf8').startsWith(log)).toBe(true);
  // A machine that was not removed keeps its identity, even if it starts with another token.
  await second.close();
  expect((await system.agent({ dataDir })).machineId).toBe(second.machineId);
  expect(existsSync(join(dataDir, 'lock.db'))).toBe(true);
});

test.each([
  ['a flag and its value', (token: string) => ['--join-token', token]],
  ['one word', (token: string) => [`--join-token=${token}`]],
])('a join token given as %s is not in the command line of an agent that runs', async (_form, given) => {
  const system = await startFarhand();
  const token = await system.joinToken();
  const dataDir = temporaryFolder('agent');
  const others = ['--broker', system.grpc, '--data-dir', dataDir, '--name', 'n'.repeat(100)];
  const agent = program('agent/main.ts', [...given(token), ...others]);
  await agent.line('linked');
  const line = readFileSync(`/proc/${agent.pid}/cmdline`, 'latin1');
  expect(line).not.toContain('farhand_join');
  expect(line.replaceAll('\0', '').trim()).toMatch(/--join-token[ =]\*\*\* --broker .* --name n{100}$/);
  expect(readFileSync(`/proc/${agent.pid}/comm`, 'latin1')).toBe('farhand-agent\n');
});

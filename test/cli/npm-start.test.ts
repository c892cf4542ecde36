// Tests of `npm start`. They run it in a copy of the checkout, because it stores its state in data/.
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { cpSync, symlinkSync } from 'node:fs';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { Farhand } from '../../shared/sdk/index.ts';
import { freeAddress } from '../find-free-ports.ts';
import { temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';

const root = join(import.meta.dirname, '../..');

function copyOfCheckout(): string {
  const folder = temporaryFolder('npm-start');
  for (const name of ['agent', 'broker', 'proto', 'scripts', 'shared', 'package.json', 'tsconfig.json'])
    cpSync(join(root, name), join(folder, name), { recursive: true });
  symlinkSync(join(root, 'node_modules'), join(folder, 'node_modules'));
  return folder;
}

/** Starts a program of the copy, which ends with the test. */
function run(folder: string, args: readonly string[], env: Record<string, string> = {}): ChildProcess {
  const child = spawn(process.execPath, args, {
    ...{ cwd: folder, env: { ...process.env, ...env } },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  onTestFinished(() => end(child));
  return child;
}

async function end(child: ChildProcess): Promise<void> {
  if (child.exitCode !== null || child.signalCode !== null) return;
  const ended = once(child, 'exit');
  child.kill('SIGINT');
  await ended;
}

/** Runs `npm start`. Resolves when it has printed all of its greeting. */
async function start(folder: string, flags: readonly string[]) {
  const child = run(folder, ['scripts/start.ts', ...flags]);
  let text = '';
  child.stdout?.setEncoding('utf8').on('data', (chunk: string) => {
    text += chunk;
  });
  await waitFor(() => expect(text).toContain('Ctrl-C stops the broker and the agent.'), { timeout: 60_000 });
  const [, key = '', machineId = ''] = /Key +(\S+)\n +Machine +(\S+)/.exec(text) ?? [];
  const [, line = ''] = /Paste this:\n\n +(.+)\n/.exec(text) ?? [];
  return { key, machineId, line, stop: () => end(child) };
}

test('npm start prints a call for the machine on which it runs, also if the broker has other machines', async () => {
  const folder = copyOfCheckout();
  const [http, grpc] = [await freeAddress(), await freeAddress()];
  const flags = ['--http', http, '--grpc', grpc];
  const first = await start(folder, flags);
  expect(execFileSync('sh', ['-c', first.line], { cwd: folder, encoding: 'utf8' })).toMatch(
    /"connected":true|status +online/,
  );
  const client = new Farhand({ baseUrl: `http://${http}`, apiKey: first.key });
  const { token } = await client.joinTokens.create({});
  const agent = [
    'agent/main.ts',
    '--broker',
    grpc,
    '--data-dir',
    temporaryFolder('agent'),
    '--name',
    'other',
  ];
  run(folder, agent, { FARHAND_JOIN_TOKEN: token });
  const online = async () => (await client.machines.list({ status: 'online' })).total;
  await waitFor(async () => expect(await online()).toBe(2), { timeout: 60_000 });
  await first.stop();
  const second = await start(folder, flags);
  expect(second).toMatchObject({ key: first.key, machineId: first.machineId });
}, 180_000);

// Data and agents of version 0.1.0 still work. The test makes them with the programs of that version, from the history
// of this repository.
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { describe, expect, onTestFinished, test } from 'vitest';
import { Farhand } from '../../shared/sdk/index.ts';
import { createLine } from '../cli-fixture.ts';
import { has } from '../skip-without-programs.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';

const root = join(import.meta.dirname, '../..');
const commit = 'c5aa056';

function isHere(): boolean {
  if (!has('git') || !existsSync(join(root, '.git'))) return false;
  try {
    execFileSync('git', ['cat-file', '-e', `${commit}^{commit}`], { cwd: root, stdio: 'ignore' });
    return true;
  } catch {
    return false;
  }
}

/** Checks out the sources of 0.1.0, and lets them use the current libraries. */
function checkout(): string {
  const folder = temporaryFolder('old');
  const archive = execFileSync(
    'git',
    ['archive', commit, 'agent', 'broker', 'proto', 'shared', 'package.json'],
    {
      cwd: root,
      maxBuffer: 1e9,
    },
  );
  execFileSync('tar', ['-x', '-C', folder], { input: archive });
  symlinkSync(join(root, 'node_modules'), join(folder, 'node_modules'));
  return folder;
}

/** Starts a program of 0.1.0. Resolves with the first line of its log that has this message. */
async function start(folder: string, main: string, args: string[], message: string) {
  const child = spawn(process.execPath, [join(folder, main), ...args], {
    stdio: ['ignore', 'ignore', 'pipe'],
  });
  onTestFinished(() => void child.kill('SIGKILL'));
  const seen: string[] = [];
  for await (const line of createInterface({ input: child.stderr })) {
    seen.push(line);
    const entry: Record<string, unknown> = line.startsWith('{') ? JSON.parse(line) : {};
    if (entry.msg !== message) continue;
    child.stderr.resume();
    return { child, entry };
  }
  throw new Error(`${main} ended before it said "${message}": ${seen.join('\n')}`);
}

const local = ['--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];

describe.skipIf(!isHere())(`version 0.1.0 (needs git and its commit ${commit})`, () => {
  test('its agent works with the broker of today: files, commands, terminals, metrics', async () => {
    const old = checkout();
    const system = await startFarhand();
    const dataDir = temporaryFolder('old-agent');
    const args = ['--broker', system.grpc, '--data-dir', dataDir, '--join-token', await system.joinToken()];
    await start(old, 'agent/main.ts', args, 'linked');
    const { items } = await system.client.machines.list({ status: 'online' });
    expect(items).toHaveLength(1);
    const machine_id = items[0]?.id ?? '';
    const folder = temporaryFolder('files');
    const path = join(folder, 'a');
    await system.client.files.write({ machine_id, path, content: 'from today\n' });
    expect(readFileSync(path, 'utf8')).toBe('from today\n');
    expect((await system.client.files.read({ machine_id, path })).content).toBe('from today\n');
    const made = await system.client.commands.create({ machine_id, command: `cat ${path}; exit 3` });
    expect(made).toMatchObject({ status: 'failed', exit_code: 3, stdout: 'from today\n' });
    const on_change = { path: folder, settle: 1_000 };
    const changed = { name: 'changed', machine_id, command: 'echo "$FARHAND_CHANGED_PATHS"', on_change };
    const { id: schedule_id } = await system.client.schedules.create(changed);
    const changeAndCount = async (): Promise<number> => {
      // Repeated, because the watch begins some time after the schedule was created.
      writeFileSync(join(folder, 'b'), String(process.hrtime.bigint()));
      return (await system.client.schedules.history({ schedule_id, status: 'completed' })).total;
    };
    await expect.poll(changeAndCount, { interval: 2_500, timeout: 30_000 }).toBeGreaterThan(0);
    const { session_id } = await system.client.sessions.create({ machine_id, shell: '/bin/cat' });
    const terminal = await system.client.sessions.terminal(
      await system.client.sessions.attach({ session_id }),
    );
    await terminal.write('typed\r');
    for await (const bytes of terminal.output) if (Buffer.from(bytes).includes('typed')) break;
    terminal.detach();
    const status = await system.client.machines.status({ machine_id });
    expect(status.memory.used + status.memory.free).toBe(status.memory.total);
    const { out } = await createLine(system)('doctor');
    expect(out).toMatch(/^warn +agents +these agents are older than the broker \(\S+\): \S+ \(0\.1\.0\)$/m);
  });

  test('data of its broker and agent works with today’s programs, without joining again', async () => {
    const old = checkout();
    const [brokerDir, agentDir] = [temporaryFolder('old-broker'), temporaryFolder('old-agent')];
    const { child, entry } = await start(
      old,
      'broker/main.ts',
      ['--data-dir', brokerDir, ...local],
      'broker is up',
    );
    const cli = (...words: string[]): string =>
      execFileSync(
        process.execPath,
        [join(old, 'broker/cli/main.ts'), ...words, '--data-dir', brokerDir, '-o', 'json'],
        {
          encoding: 'utf8',
        },
      );
    const { key } = JSON.parse(cli('auth', 'create-key', '--name', 'old'));
    const { token } = JSON.parse(cli('join-tokens', 'create'));
    const agent = await start(
      old,
      'agent/main.ts',
      ['--broker', String(entry.grpc), '--data-dir', agentDir, '--join-token', token],
      'linked',
    );
    const client = new Farhand({ baseUrl: String(entry.http), apiKey: key });
    const machine_id = (await client.machines.list()).items[0]?.id ?? '';
    const { id: command_id } = await client.commands.create({ machine_id, command: 'echo of old' });
    await client.machines.update({ machine_id, tags: ['kept'] });
    for (const one of [agent.child, child]) {
      one.kill('SIGTERM');
      await once(one, 'exit');
    }

    const system = await startFarhand({ dataDir: brokerDir });
    const today = new Farhand({ baseUrl: system.url, apiKey: key });
    expect(await today.commands.get({ command_id })).toMatchObject({
      stdout: 'of old\n',
      status: 'completed',
    });
    const same = await system.agent({ dataDir: agentDir, joinToken: '' });
    expect(same.machineId).toBe(machine_id);
    await waitFor(async () =>
      expect(await today.machines.get({ machine_id })).toMatchObject({ status: 'online', tags: ['kept'] }),
    );
    expect(await today.commands.create({ machine_id, command: 'echo of new' })).toMatchObject({
      stdout: 'of new\n',
    });
  });
});

// An agent in another language: Python's gRPC with the code that protoc generates from link.proto and
// agent.proto. It links to a real broker.
import { spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { cpus } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { expect, onTestFinished, test } from 'vitest';
import { startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';
import { generatePython, lacksPython, python } from './python-grpc.ts';

/** Starts the agent as a separate process. Ends it with the test. */
function startAgent(generated: string, system: TestSystem, joinToken: string) {
  const args = [join(import.meta.dirname, 'agent.py'), system.grpc, temporaryFolder('agent'), joinToken];
  const env = { ...process.env, PYTHONPATH: generated, PYTHONDONTWRITEBYTECODE: '1' };
  const child = spawn(python, args, { env, stdio: ['ignore', 'ignore', 'pipe'] });
  onTestFinished(() => void child.kill('SIGKILL'));
  let waiting: Record<string, unknown>[] = [];
  const lines = createInterface({ input: child.stderr });
  lines.on('line', (line) => {
    // Python prints its own errors as plain text, the agent its log as JSON.
    waiting.push(line.startsWith('{') ? JSON.parse(line) : { msg: line });
    child.emit('logged');
  });
  child.once('close', () => child.emit('logged'));
  return {
    ended: once(child, 'close'),
    /** Resolves with the next line of the agent's log that has this message. */
    async line(text: string): Promise<Record<string, unknown>> {
      for (;;) {
        const at = waiting.findIndex(({ msg }) => msg === text);
        const found = waiting[at];
        waiting = waiting.slice(at + 1);
        if (found) return found;
        if (child.exitCode !== null)
          throw new Error(`the agent ended without "${text}": ${JSON.stringify(waiting)}`);
        await once(child, 'logged');
      }
    },
  };
}

/** A broker with the linked Python agent. */
async function linkedSystem() {
  const system = await startFarhand();
  const agent = startAgent(
    generatePython('link/v1/link.proto', 'agent/v1/agent.proto'),
    system,
    await system.joinToken(),
  );
  const { machine_id } = (await agent.line('linked')) as { machine_id: string };
  const folder = temporaryFolder('files');
  return { system, agent, machine_id, at: (name: string): string => join(folder, name) };
}

/** Debian packages: python3-grpcio, python3-cryptography, protobuf-compiler and protobuf-compiler-grpc. */
const needed = '(skipped where python3-grpcio, python3-cryptography, protoc or its plugin is missing)';
const testPython = test.skipIf(lacksPython('grpc', 'cryptography'));

testPython(
  `an agent in Python refuses what it lacks and what cannot be, and changes nothing then ${needed}`,
  async () => {
    const { system, machine_id, at } = await linkedSystem();
    const { client } = system;
    const path = at('file');
    await expect(client.files.read({ machine_id, path })).rejects.toMatchObject({ code: 'file_not_found' });
    await expect(client.files.mkdir({ machine_id, path })).rejects.toMatchObject({ code: 'not_supported' });
    expect(await client.commands.create({ machine_id, command: 'true' })).toMatchObject({
      status: 'failed',
      reason: expect.stringContaining('not_supported'),
    });

    writeFileSync(path, 'old');
    const other = { machine_id, path, content: 'new', if_match: '"other"' };
    await expect(client.files.write(other)).rejects.toMatchObject({ code: 'precondition_failed' });
    const second = { machine_id, path, content: new Blob(['new']), overwrite: false };
    await expect(client.files.put(second)).rejects.toMatchObject({ code: 'already_exists' });
    expect(readFileSync(path, 'utf8')).toBe('old');
    expect(readdirSync(at('.'))).toEqual(['file']);
  },
);

testPython(
  `an agent in Python lists, reads and writes files byte for byte, small and large ${needed}`,
  async () => {
    const { system, machine_id, at } = await linkedSystem();
    const { client, url, key } = system;

    const path = at('new/small');
    await client.files.write({ machine_id, path, content: 'früh', create_parents: true, mode: '0640' });
    expect([readFileSync(path, 'utf8'), statSync(path).mode & 0o777]).toEqual(['früh', 0o640]);
    expect(await client.files.read({ machine_id, path })).toMatchObject({ content: 'früh', size: 5 });

    const large = { machine_id, path: at('large') };
    const bytes = randomBytes(5_000_000);
    const sent = await client.files.put({ ...large, content: new Blob([bytes]) });
    expect(sent).toMatchObject({ size: bytes.length, created: true });
    expect(readFileSync(large.path).equals(bytes)).toBe(true);
    const download = `${url}/api/v1/machines/${machine_id}/files/download?path=${large.path}`;
    const received = await fetch(download, { headers: { Authorization: `Bearer ${key}` } });
    expect(Buffer.from(await received.arrayBuffer()).equals(bytes)).toBe(true);

    const short = await client.files.list({ machine_id, path: at('.') });
    expect(short.files).toMatchObject([
      { name: 'new', type: 'directory' },
      { name: 'large', type: 'file', size: bytes.length },
    ]);
    // This listing is too large for a reply on the control stream, which may have at most 64 KiB. The agent must
    // therefore use a stream of its own.
    for (let number = 0; number < 1_000; number += 1) writeFileSync(at(`new/${number}`.padEnd(100, '-')), '');
    const long = await client.files.list({ machine_id, path: at('new') });
    expect(long.files.map(({ name }) => name)).toEqual(readdirSync(at('new')).sort());
  },
);

testPython(
  `an agent in Python comes back after its broker restarts, and stops when it is removed ${needed}`,
  async () => {
    const { system, agent, machine_id, at } = await linkedSystem();
    writeFileSync(at('file'), 'here');
    await system.broker.close();
    const { client } = await startFarhand({ dataDir: system.dataDir, flags: ['--grpc', system.grpc] });
    expect(await agent.line('linked')).toMatchObject({ machine_id });
    expect(await client.files.read({ machine_id, path: at('file') })).toMatchObject({ content: 'here' });
    expect(await client.machines.status({ machine_id })).toMatchObject({
      connected: true,
      cpu: { cores: cpus().length },
    });

    await client.machines.remove({ machine_id });
    expect((await agent.ended)[0]).toBe(1);
  },
);

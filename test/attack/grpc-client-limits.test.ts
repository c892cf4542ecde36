// Limits for clients of the gRPC streams: clients that never authenticate, never read, or vanish without closing their
// connection.
import { createHash, randomBytes } from 'node:crypto';
import { readdirSync, readlinkSync, truncateSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { credentials, status as grpcStatus, loadPackageDefinition } from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';
import { protoPath } from 'grpc-health-check';
import { expect, onTestFinished, test } from 'vitest';
import type { ExecRequest } from '../../proto/types/farhand/client/v1/ExecRequest.ts';
import type { WriteFileRequest } from '../../proto/types/farhand/client/v1/WriteFileRequest.ts';
import { linkServerName } from '../../shared/agent-rpcs.ts';
import { connect } from '../../shared/grpc-api-client.ts';
import { gate, soon } from '../commands-fixture.ts';
import { caOf, line, refusalOf, streamsOf } from '../grpc-fixture.ts';
import { startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';
import { startProxy } from '../tcp-proxy.ts';

/** True if this process has a file open. */
function isOpen(path: string): boolean {
  return readdirSync('/proc/self/fd').some((fd) => {
    try {
      return readlinkSync(`/proc/self/fd/${fd}`) === path;
    } catch {
      return false;
    }
  });
}

/** A client of the standard health service, without a key. */
async function healthOf(system: TestSystem) {
  // biome-ignore lint/suspicious/noExplicitAny: made from a proto at run time
  const loaded = loadPackageDefinition(loadSync(protoPath, { enums: String })) as any;
  const options = { 'grpc.ssl_target_name_override': linkServerName };
  const client = new loaded.grpc.health.v1.Health(
    system.grpc,
    credentials.createSsl(Buffer.from(await caOf(system))),
    options,
  );
  onTestFinished(() => client.close());
  return client;
}

test('health needs no key, and reports NOT_SERVING before the broker is gone', async () => {
  const system = await startFarhand();
  const client = await healthOf(system);
  const check = (service: string): Promise<string> =>
    new Promise((resolve, reject) => {
      client.check({ service }, (error: unknown, answer: { status: string }) =>
        error ? reject(error) : resolve(answer.status),
      );
    });
  expect(await check('')).toBe('SERVING');
  expect(await check('farhand.client.v1.Streams')).toBe('SERVING');
  await expect(check('farhand.link.v1.Nothing')).rejects.toMatchObject({ code: grpcStatus.NOT_FOUND });
  const received: string[] = [];
  const watch = client.watch({ service: '' });
  watch.on('data', ({ status }: { status: string }) => received.push(status));
  watch.on('error', () => undefined);
  await soon(() => received).toEqual(['SERVING']);
  await system.broker.close();
  await soon(() => received).toEqual(['SERVING', 'NOT_SERVING']);
});

test('a connection without a valid key is cut, and one with a key is not', async () => {
  const system = await startFarhand({ tuning: { proofMs: 500 } });
  const { machineId: machine_id } = await system.agent();
  const good = (await streamsOf(system)).watchFiles({ machine_id, path: temporaryFolder('watched') });
  expect((await good.next()).done).toBe(false);
  let open = true;
  const heard = refusalOf(good).then(() => {
    open = false;
  });
  const bad = await healthOf(system);
  const cut = new Promise<number>((resolve) => {
    const watch = bad.watch({ service: '' });
    watch.on('data', () => undefined).on('error', (error: { code: number }) => resolve(error.code));
  });
  expect(await cut).toBe(grpcStatus.UNAVAILABLE);
  // The client with a key (`good`) connected before the other client (`bad`). Without its key, it would have been
  // disconnected before `bad`.
  expect(open).toBe(true);
  await system.broker.close();
  await heard;
});

test('a reader that stops reading uses little memory and delays no other reader', async () => {
  const system = await startFarhand();
  const { machineId: machine_id } = await system.agent();
  const path = join(temporaryFolder('large'), 'file');
  const size = 112 * 1024 * 1024;
  writeFileSync(path, '');
  truncateSync(path, size);
  const [slow, quick] = [await streamsOf(system), await streamsOf(system)];
  const before = process.memoryUsage().arrayBuffers;
  const stalled = slow.readFile({ machine_id, path });
  await stalled.next();
  await stalled.next();
  let read = 0;
  for await (const { chunk } of quick.readFile({ machine_id, path })) read += chunk?.length ?? 0;
  expect(read).toBe(size);
  // Broker, agent and both clients run in this process. Together they may buffer a few windows, much less than the 112
  // MiB of the file.
  expect(process.memoryUsage().arrayBuffers - before).toBeLessThan(64 * 1024 * 1024);
  await stalled.return(undefined);
});

test('a client that stops reading or writing a file is cut, so that others can transfer files', async () => {
  const system = await startFarhand({ tuning: { stalledMs: 300 } });
  const { machineId: machine_id } = await system.agent();
  const folder = temporaryFolder('stalled');
  const path = join(folder, 'file');
  writeFileSync(path, '');
  truncateSync(path, 64 * 1024 * 1024);
  const client = await streamsOf(system);
  const reading = client.readFile({ machine_id, path });
  await reading.next();
  const writing = line<WriteFileRequest>({ open: { machine_id, path: join(folder, 'new') } });
  expect(await refusalOf(client.writeFile(writing.requests))).toMatchObject({ code: 'unavailable' });
  await soon(() => readdirSync(folder)).toEqual(['file']);
  // The agent runs in this process, so its open files are those of the process.
  await soon(() => isOpen(path)).toBe(false);
  expect(await refusalOf(reading)).toMatchObject({ code: 'unavailable' });
});

test('a client that is cut off during a write leaves nothing, and the input of a command stays open', async () => {
  const system = await startFarhand();
  const { machineId: machine_id } = await system.agent();
  const proxy = await startProxy(system.grpc);
  onTestFinished(() => proxy.close());
  const client = await streamsOf(system, system.key, proxy.address);
  const folder = temporaryFolder('cut');
  const writing = line<WriteFileRequest>(
    { open: { machine_id, path: join(folder, 'file') } },
    { chunk: Buffer.alloc(1_000) },
  );
  const running = line<ExecRequest>(
    { start: { machine_id, command: 'cat' } },
    { stdin: Buffer.from('first ') },
  );
  const ends = [refusalOf(client.writeFile(writing.requests)), refusalOf(client.exec(running.requests))];
  await soon(() => readdirSync(folder).length).toBe(1);
  const commandOf = async () => (await system.client.commands.list()).items[0];
  await soon(async () => (await commandOf())?.stdout).toBe('first ');
  proxy.cut();
  for (const refused of await Promise.all(ends)) expect(refused).toMatchObject({ code: 'unavailable' });
  await soon(() => readdirSync(folder)).toEqual([]);
  const { id: command_id = '' } = (await commandOf()) ?? {};
  await system.client.commands.input({ command_id, data: 'second', end: true });
  await soon(async () => (await commandOf())?.stdout).toBe('first second');
});

test('input is neither lost nor repeated if the link is lost meanwhile', async () => {
  const system = await startFarhand();
  const proxy = await startProxy(system.grpc);
  onTestFinished(() => proxy.close());
  const agent = await system.agent({ through: proxy.address });
  const client = await streamsOf(system);
  const held = gate();
  const input = randomBytes(2_500_000);
  const start = { machine_id: agent.machineId, command: `echo ready; ${held.wait}; sha256sum` };
  async function* requests() {
    yield { start };
    for (let at = 0; at < input.length; at += 250_000) {
      yield { stdin: input.subarray(at, at + 250_000) };
    }
  }
  let text = '';
  for await (const { output, end } of client.exec(requests())) {
    if (output?.offset === 0) {
      const back = agent.linked(false).then(() => agent.linked(true));
      proxy.cut();
      await back;
      held.open();
    }
    text += output?.data.toString() ?? '';
    if (end) expect(end.status).toBe('completed');
  }
  expect(text).toBe(`ready\n${createHash('sha256').update(input).digest('hex')}  -\n`);
});

test('a frozen client is disconnected when it answers no ping', async () => {
  const system = await startFarhand({ tuning: { pings: { pingMs: 200, pongMs: 300 } } });
  const { machineId: machine_id } = await system.agent();
  const proxy = await startProxy(system.grpc);
  onTestFinished(() => proxy.close());
  const client = await streamsOf(system, system.key, proxy.address);
  const asked = line<ExecRequest>({ start: { machine_id, command: 'cat', cancel_on_disconnect: true } });
  const running = refusalOf(client.exec(asked.requests));
  const statusOf = async () => (await system.client.commands.list()).items[0]?.status;
  await soon(statusOf).toBe('running');
  proxy.stall();
  await soon(statusOf).toBe('cancelled');
  proxy.resume();
  await running;
});

test('a key of another broker is refused, even if the client trusts this broker’s authority', async () => {
  const [system, other] = [await startFarhand(), await startFarhand()];
  const client = connect({ address: system.grpc, ca: await caOf(system), apiKey: other.key });
  onTestFinished(() => client.close());
  expect(await refusalOf(client.events({}))).toMatchObject({ code: 'unauthorized', status: 401 });
});

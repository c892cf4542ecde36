// gRPC calls about machines of another broker, forwarded over the peer port, from the client to the disk of the machine
// and back.
import { randomBytes } from 'node:crypto';
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { expect, onTestFinished, test, vi } from 'vitest';
import { leaseMs } from '../../broker/cluster/cluster-tables.ts';
import { shared } from '../close-after-tests.ts';
import { all, hearing, line, refusalOf, streamsOf } from '../grpc-fixture.ts';
import { temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';
import { startTwoBrokers } from './two-brokers.ts';

const brokers = shared(startTwoBrokers);

// ---- Failures

test('a call fails as unavailable if the owner of its machine cannot be reached', async () => {
  const { front, machineId: machine_id, throughProxy } = await startTwoBrokers();
  throughProxy().forbid();
  const client = await streamsOf(front);
  const refusal = await refusalOf(client.readFile({ machine_id, path: '/etc/hostname' }));
  expect([refusal.code, refusal.details]).toMatchObject(['unavailable', { retry_after: 1 }]);
});

test('a call goes directly to the owner of its machine, even if the environment sets an HTTP proxy', async () => {
  const { front, machineId: machine_id } = await startTwoBrokers();
  const client = await streamsOf(front);
  // No server listens on this port. It is set only now, because the client of the test would use the proxy too.
  vi.stubEnv('https_proxy', 'http://127.0.0.1:1');
  onTestFinished(() => void vi.unstubAllEnvs());
  expect(await all(client.readFile({ machine_id, path: '/etc/hostname' }))).not.toEqual([]);
});

test('a call ends as unavailable if the connection to the owner of its machine is lost', async () => {
  const { front, machineId: machine_id, throughProxy } = await startTwoBrokers();
  const proxy = throughProxy();
  const client = await streamsOf(front);
  const watch = client.watchFiles({ machine_id, path: temporaryFolder('lost') });
  expect((await watch.next()).value).toMatchObject({ change: '' });
  proxy.cut();
  expect((await refusalOf(watch)).code).toBe('unavailable');
});

test('a call goes on although the owner of its machine stalls for less than the length of a lease', async () => {
  const { front, machineId: machine_id, throughProxy } = await startTwoBrokers();
  const proxy = throughProxy();
  const client = await streamsOf(front);
  const folder = temporaryFolder('stalled');
  const watch = client.watchFiles({ machine_id, path: folder });
  expect((await watch.next()).value).toMatchObject({ change: '' });
  proxy.stall();
  // The connection stalls for 0.5 s less than a lease. After 4 s of silence the front broker begins to check the
  // connection to the owner. This check must not fail before the stall ends.
  await sleep(leaseMs - 500);
  proxy.resume();
  writeFileSync(join(folder, 'new'), '');
  expect((await watch.next()).value).toMatchObject({ path: join(folder, 'new') });
  await watch.return(undefined);
});

test('a forwarded call is not forwarded again', async () => {
  const { front, machineId: machine_id, own } = await startTwoBrokers();
  own((seenBy) => (seenBy === 'front' ? 'owner' : 'front'));
  const client = await streamsOf(front);
  const refusal = await refusalOf(client.readFile({ machine_id, path: '/etc/hostname' }));
  expect([refusal.code, refusal.details]).toMatchObject([
    'unavailable',
    { broker_id: 'front', retry_after: 1 },
  ]);
});

test('the client gets refusals of the owner with their codes and details', async () => {
  const { front, reader, machineId: machine_id } = await brokers();
  const client = await streamsOf(front, reader);
  const missing = await refusalOf(client.readFile({ machine_id, path: '/nonexistent' }));
  expect([missing.code, missing.status, missing.details]).toMatchObject([
    'file_not_found',
    404,
    { path: '/nonexistent' },
  ]);
  const exec = await refusalOf(client.exec([{ start: { machine_id, command: 'true' } }]));
  expect([exec.code, exec.details]).toEqual(['forbidden', { required_scope: 'commands:execute' }]);
});

test('a command is cancelled at the owner when its client leaves', async () => {
  const { front, owner, machineId: machine_id } = await brokers();
  const client = await streamsOf(front);
  const left = new AbortController();
  const start = { machine_id, command: 'echo here; sleep 60', cancel_on_disconnect: true };
  const call = client.exec(line({ start }).requests, { signal: left.signal });
  let command_id = '';
  for await (const { accepted, output } of call) {
    command_id ||= accepted?.command_id ?? '';
    if (output) break;
  }
  left.abort();
  await waitFor(async () => {
    const { data } = (await owner.call('GET', `/commands/${command_id}`)).body;
    expect(data.status).toBe('cancelled');
  });
});

// ---- What is forwarded

test('a file is written and read in chunks, and a wrong checksum changes nothing', async () => {
  const { front, machineId: machine_id } = await brokers();
  const client = await streamsOf(front);
  const path = join(temporaryFolder('grpc'), 'file');
  const bytes = randomBytes(5_000_000);
  const open = { open: { machine_id, path } };
  const chunks = [0, 1, 2, 3, 4].map((n) => ({ chunk: bytes.subarray(n * 1_000_000, (n + 1) * 1_000_000) }));
  const wrong = client.writeFile([open, ...chunks, { commit: { sha256: '0'.repeat(64) } }]);
  expect([(await refusalOf(wrong)).code, existsSync(path)]).toEqual(['validation_failed', false]);
  const written = await client.writeFile([open, ...chunks, { commit: {} }]);
  expect([written.size, readFileSync(path).equals(bytes)]).toEqual([5_000_000, true]);
  const [head, ...rest] = await all(client.readFile({ machine_id, path }));
  expect(head?.head?.length).toBe(5_000_000);
  expect(Buffer.concat(rest.map(({ chunk }) => chunk ?? Buffer.alloc(0))).equals(bytes)).toBe(true);
});

test('a command gets input and signals, and its output arrives to the end', async () => {
  const { front, machineId: machine_id } = await brokers();
  const client = await streamsOf(front);
  const { requests, send, end } = line<object>({
    start: { machine_id, command: 'read a; echo got $a; exit 3' },
  });
  const { heard, take } = hearing();
  let code: unknown;
  for await (const message of client.exec(requests, { idempotencyKey: 'forwarded-exec' })) {
    if (message.accepted) {
      send({ stdin: Buffer.from('words\n') });
      end();
    }
    take(message.output);
    code = message.end?.exit_code ?? code;
  }
  expect([heard.stdout.toString(), code]).toEqual(['got words\n', 3]);
  const again = await all(
    client.exec([{ start: { machine_id, command: 'read a; echo got $a; exit 3' } }], {
      idempotencyKey: 'forwarded-exec',
    }),
  );
  expect(again.at(-1)?.end?.exit_code).toBe(3);
});

test('changes of files arrive while the call is open', async () => {
  const { front, machineId: machine_id } = await brokers();
  const client = await streamsOf(front);
  const folder = temporaryFolder('grpc-watch');
  const watch = client.watchFiles({ machine_id, path: folder });
  await watch.next();
  writeFileSync(join(folder, 'new'), '');
  expect((await watch.next()).value).toMatchObject({ path: join(folder, 'new') });
  await watch.return(undefined);
});

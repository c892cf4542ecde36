// Addresses that webhooks must not call, in every spelling, and names that resolve to such addresses.
import { once } from 'node:events';
import { connect, createServer, isIPv4 } from 'node:net';
import { networkInterfaces } from 'node:os';
import { expect, test } from 'vitest';
import { AddressGuard, type Network, networkOf } from '../broker/deliveries/address-guard.ts';
import { startLateServer } from './late-server.ts';
import { listenOnLoopback } from './listen-on-loopback.ts';
import { startFarhand, type TestSystem } from './start-farhand.ts';
import { waitFor } from './wait-for.ts';
import { startReceiver, startWebhookSystem } from './webhook-receivers.ts';

const guardOf = (...allowed: Network[]) => new AddressGuard(allowed, async () => []);

const refused: [string, string][] = [
  ['loopback', '127.0.0.1'],
  ['all of loopback', '127.9.9.9'],
  ['nothing', '0.0.0.0'],
  ['one number', '2130706433'],
  ['hexadecimal', '0x7f000001'],
  ['hexadecimal by part', '0x7f.0x0.0x0.0x1'],
  ['octal', '0177.0.0.1'],
  ['octal zeros', '00000177.1'],
  ['two parts', '127.1'],
  ['three parts', '10.0.1'],
  ['a trailing dot', '127.0.0.1.'],
  ['full-width digits', '１２７.０.０.１'],
  ['full-width dots', '127。0。0。1'],
  ['circled digits', '①②⑦.⓪.⓪.①'],
  ['percent-encoded', '%31%32%37.0.0.1'],
  ['private, 10', '10.1.2.3'],
  ['private, 172.16', '172.31.255.255'],
  ['private, 192.168', '192.168.1.1'],
  ['link-local: metadata of clouds', '169.254.169.254'],
  ['metadata as one number', '2852039166'],
  ['metadata of Azure', '168.63.129.16'],
  ['metadata of Alibaba', '100.100.100.200'],
  ['carrier-grade NAT', '100.64.0.1'],
  ['multicast', '224.0.0.1'],
  ['broadcast', '255.255.255.255'],
  ['reserved', '240.0.0.1'],
  ['benchmarking', '198.18.0.1'],
  ['documentation', '192.0.2.1'],
  ['protocol assignments', '192.0.0.1'],
  ['IPv6 loopback', '[::1]'],
  ['IPv6 nothing', '[::]'],
  ['mapped', '[::ffff:127.0.0.1]'],
  ['mapped, hexadecimal', '[::ffff:7f00:1]'],
  ['mapped, with all zeros', '[0:0:0:0:0:ffff:7f00:1]'],
  ['compatible', '[::127.0.0.1]'],
  ['SIIT', '[::ffff:0:127.0.0.1]'],
  ['NAT64', '[64:ff9b::127.0.0.1]'],
  ['NAT64 of metadata', '[64:ff9b::a9fe:a9fe]'],
  ['local NAT64', '[64:ff9b:1::a00:1]'],
  ['6to4', '[2002:7f00:1::]'],
  ['6to4 of a private one', '[2002:c0a8:101::1]'],
  ['Teredo', '[2001:0:4136:e378:8000:63bf:3fff:fdd2]'],
  ['IPv6 link-local', '[fe80::1]'],
  ['unique local', '[fd00::1]'],
  ['metadata of AWS by IPv6', '[fd00:ec2::254]'],
  ['site-local', '[fec0::1]'],
  ['IPv6 multicast', '[ff02::1]'],
  ['IPv6 documentation', '[2001:db8::1]'],
  ['segment routing', '[5f00::1]'],
  ['not assigned', '[4000::1]'],
];

test.each(refused)('%s (%s) must not be called', async (_what, host) => {
  const url = new URL(`http://${host}/`);
  await expect(guardOf().assertUrl(url)).rejects.toThrow('not public');
  await expect(guardOf().resolve(url.hostname, 80)).rejects.toThrow('not public');
});

const allowed: [string, string][] = [
  ['an ordinary address', '93.184.215.14'],
  ['an ordinary address as one number', '1572395790'],
  ['an IPv6 address', '[2606:2800:21f:cb07:6820:80da:af6b:8b2c]'],
  ['an ordinary address, mapped', '[::ffff:93.184.215.14]'],
  ['NAT64 of an ordinary one', '[64:ff9b::5db8:d70e]'],
  ['6to4 of an ordinary one', '[2002:5db8:d70e::1]'],
  ['a name, which is checked when it is resolved', 'example.org'],
];

test.each(allowed)('%s (%s) may be called', async (_what, host) => {
  await guardOf().assertUrl(new URL(`http://${host}/`));
});

test.each([
  ['10.0.0.0/8', '10.9.9.9', '127.0.0.1', '192.168.0.1'],
  ['10.0.0.7', '10.0.0.7', '10.0.0.8', '::ffff:10.0.0.8'],
  ['10.0.0.0/8', '::ffff:10.9.9.9', '::ffff:127.0.0.1', '::1'],
  ['::ffff:10.0.0.0/104', '10.9.9.9', '127.0.0.1', 'fd00::1'],
  ['fd00::/8', 'fd12::1', 'fe80::1', '10.0.0.1'],
  ['::1', '::1', '::2', '127.0.0.1'],
])('--webhook-allow %s opens %s and neither %s nor %s', async (range, inside, ...outside) => {
  const guard = guardOf(networkOf(range)!);
  expect(await guard.resolve(inside, 80)).toEqual({ addresses: [inside], isInternal: true });
  for (const address of outside) {
    expect(() => guard.assertAddress(address)).toThrow('not public');
  }
});

test('an IPv4 address with a zone is a host name, which is resolved', async () => {
  const guard = new AddressGuard([], async () => ['127.0.0.1']);
  await expect(guard.resolve('8.8.8.8%.example.org', 25)).rejects.toThrow(
    'resolves to an address that is not public',
  );
});

test.each(['', 'example.org', '127.1', '0x7f000001', '1', '999.1.1.1', 'fe80::1%eth0', '::ffff:7f00:1%1'])(
  'a resolved address that is not public (%s) is refused',
  (text) => {
    expect(() => guardOf().assertAddress(text)).toThrow('not public');
  },
);

test('every spelling of a forbidden address is refused when a webhook is created, and the error names the field url', async () => {
  const system = await startFarhand();
  for (const [what, host] of refused) {
    const url = `https://${host}:8443/hook`;
    const { status, body } = await system.call('POST', '/webhooks', { body: { url, events: ['*'] } });
    expect([what, status, body.error.details.issues?.[0].path]).toEqual([what, 422, 'url']);
  }
  const { id } = await system.client.webhooks.create({ url: 'https://example.org/', events: ['*'] });
  const { status } = await system.call('PATCH', `/webhooks/${id}`, { body: { url: 'https://[::1]/' } });
  expect(status).toBe(422);
});

/** Listens on a loopback port that must never be called, and counts its connections. */
async function startTrap() {
  let calls = 0;
  const server = createServer((socket) => {
    calls += 1;
    socket.destroy();
  });
  return { port: await listenOnLoopback(server), calls: () => calls };
}

test.each([
  ['localhost', 'localhost'],
  ['a name below localhost', 'any.localhost'],
  ['a trailing dot', 'localhost.'],
])('a name of this machine (%s) is refused at the delivery', async (_what, name) => {
  const [system, trap] = [await startFarhand(), await startTrap()];
  const { id } = await system.client.webhooks.create({ url: `http://${name}:${trap.port}/`, events: ['*'] });
  const result = await system.client.webhooks.test({ webhook_id: id });
  expect(result).toMatchObject({ delivered: false, status_code: null });
  expect(result.error).toContain('not public');
  expect(trap.calls()).toBe(0);
});

test('a name with one address that is not public is refused, whichever it is', async () => {
  const trap = await startTrap();
  const answers: Record<string, string[]> = {
    'first.example': ['127.0.0.1', '93.184.215.14'],
    'last.example': ['93.184.215.14', '2606:2800:21f:cb07:6820:80da:af6b:8b2c', '::ffff:127.0.0.1'],
    'none.example': [],
  };
  const system = await startFarhand({ tuning: { resolve: async (name) => answers[name] ?? [] } });
  for (const [name, addresses] of Object.entries(answers)) {
    const { id } = await system.client.webhooks.create({
      url: `http://${name}:${trap.port}/`,
      events: ['*'],
    });
    const { delivered, error } = await system.client.webhooks.test({ webhook_id: id });
    expect([name, delivered, error]).toEqual([
      name,
      false,
      addresses.length ? expect.stringContaining('not public') : 'no address',
    ]);
  }
  expect(trap.calls()).toBe(0);
});

test('a name whose address changes between two deliveries is checked at each', async () => {
  const receiver = await startReceiver();
  const addresses = ['127.0.0.9'];
  const system = await startWebhookSystem({
    flags: ['--webhook-allow', '127.0.0.1'],
    tuning: { resolve: async () => [addresses.shift() ?? '127.0.0.1'] },
  });
  const { id } = await system.client.webhooks.create({
    url: `http://turns.example:${receiver.port}/`,
    events: ['*'],
  });
  const first = await system.client.webhooks.test({ webhook_id: id });
  expect(first.error).toContain('turns.example resolves to an address that is not public');
  expect(await system.client.webhooks.test({ webhook_id: id })).toMatchObject({ delivered: true });
  expect(receiver.got).toHaveLength(1);
});

test('an internal receiver is no longer called once the broker starts without its --webhook-allow', async () => {
  const trap = await startTrap();
  const before = await startWebhookSystem();
  const url = `http://127.0.0.1:${trap.port}/`;
  const { id } = await before.client.webhooks.create({ url, events: ['*'] });
  await before.broker.close();
  const system = await startFarhand({ dataDir: before.dataDir });
  const { delivered, error } = await system.client.webhooks.test({ webhook_id: id });
  expect([delivered, error]).toEqual([false, expect.stringContaining('not public')]);
  expect(trap.calls()).toBe(0);
});

/**
 * Returns the URLs of the HTTP port and the gRPC port of a broker, under each of these hosts, with http and with https.
 */
function listenersOf(system: TestSystem, hosts: readonly string[]): string[] {
  const ports = [new URL(system.url).port, system.grpc.split(':')[1]];
  return ports.flatMap((port) =>
    hosts.flatMap((host) => [`http://${host}:${port}`, `https://${host}:${port}`]),
  );
}

const everywhere = ['--webhook-allow', '0.0.0.0/0,::/0', '--http', '0.0.0.0:0', '--insecure-http'];

test('the broker’s own listeners are refused when a webhook is created or changed, by address and by name, even if --webhook-allow names them', async () => {
  const answers: Record<string, string[]> = {
    'here.example': ['93.184.215.14', '127.0.0.1'],
    'there.example': ['93.184.215.14'],
    'sixth.example': ['::1'],
  };
  const resolve = async (name: string) => {
    const found = answers[name];
    if (!found) throw new Error('no such name');
    return found;
  };
  const system = await startFarhand({ flags: everywhere, tuning: { resolve } });
  const own = Object.values(networkInterfaces())
    .flatMap((one) => one ?? [])
    .filter(({ address }) => isIPv4(address));
  const hosts = ['127.0.0.1', '127.0.0.2', '0.0.0.0', '[::]', '[::1]', '[::ffff:127.0.0.1]', '2130706433'];
  const places = [
    ...hosts,
    ...own.map(({ address }) => address),
    'here.example',
    'HERE.example',
    'sixth.example',
  ];
  const { id } = await system.client.webhooks.create({ url: 'https://example.org/', events: ['*'] });
  for (const url of listenersOf(system, places)) {
    const made = await system.call('POST', '/webhooks', { body: { url, events: ['*'] } });
    const changed = await system.call('PATCH', `/webhooks/${id}`, { body: { url } });
    for (const { status, body } of [made, changed]) {
      expect([url, status, body.error?.details.issues]).toEqual([
        url,
        422,
        [{ path: 'url', message: 'webhooks and alert channels must not call this broker itself' }],
      ]);
    }
  }
  const others = listenersOf(system, ['93.184.215.14', 'there.example', 'unknown.example']);
  for (const url of [...others, 'http://127.0.0.1:1/', 'http://here.example:1/']) {
    const { status } = await system.call('POST', '/webhooks', { body: { url, events: ['*'] } });
    expect([url, status]).toEqual([url, 201]);
  }
});

test('the broker’s own listeners are refused at the delivery, even if --webhook-allow names their address', async () => {
  let addresses: string[] = [];
  const system = await startFarhand({ flags: everywhere, tuning: { resolve: async () => addresses } });
  for (const url of listenersOf(system, ['turns.example'])) {
    addresses = ['93.184.215.14'];
    const { id } = await system.client.webhooks.create({ url: `${url}/healthz`, events: ['*'] });
    for (const address of ['127.0.0.1', '0.0.0.0']) {
      addresses = [address];
      const { status_code, error } = await system.client.webhooks.test({ webhook_id: id });
      expect([url, address, status_code, error]).toEqual([
        ...[url, address, null],
        'webhooks and alert channels must not call this broker itself',
      ]);
    }
  }
});

test('a receiver that is slow to connect gets the event, although its other address refuses connections', async () => {
  const system = await startFarhand({
    flags: everywhere,
    tuning: { resolve: async () => ['127.0.0.1', '::1'] },
  });
  const receiver = await startReceiver();
  const url = `http://far.example:${await startLateServer(Number(new URL(receiver.url).port))}/`;
  const { id: webhook_id } = await system.client.webhooks.create({ url, events: ['*'] });
  expect(await system.client.webhooks.test({ webhook_id })).toMatchObject({ delivered: true });
});

test('a connection to a listener of the broker itself is destroyed, whatever the network interfaces', async () => {
  const { port } = await startTrap();
  const socket = connect({ host: '127.0.0.1', port: Number(port) });
  await once(socket, 'connect');
  const guard = guardOf();
  guard.refuseSelf(socket);
  guard.protect(Number(port));
  expect(() => guard.refuseSelf(socket)).toThrow(
    'webhooks and alert channels must not call this broker itself',
  );
  expect(socket.destroyed).toBe(true);
});

test('no answer to a test, a delivery or a change contains the address to which a name resolves', async () => {
  const secret = '10.11.12.13';
  const resolve = async () => [secret, '93.184.215.14'];
  const system = await startWebhookSystem({ flags: ['--webhook-retry', '1h'], tuning: { resolve } });
  const { id } = await system.client.webhooks.create({ url: 'http://intra.corp/', events: ['machine.*'] });
  const result = await system.call('POST', `/webhooks/${id}/test`);
  expect(result.body.data).toMatchObject({
    delivered: false,
    error:
      'intra.corp resolves to an address that is not public; to allow calls, add the address or its network to --webhook-allow of the broker',
  });
  await system.happen('machine.online');
  const delivered = await waitFor(async () => {
    const answer = await system.call('GET', `/webhooks/${id}/deliveries`);
    expect(answer.body.data).toMatchObject([{ attempts: [{ error: result.body.data.error }] }]);
    return answer;
  });
  const changed = await system.call('PATCH', `/webhooks/${id}`, { body: { enabled: false } });
  expect(changed.body.data.last_delivery.error).toBe(result.body.data.error);
  expect(JSON.stringify([result.body, delivered.body, changed.body])).not.toContain(secret);
});

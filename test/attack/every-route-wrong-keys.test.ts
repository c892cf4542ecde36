// Every REST route and every gRPC method with every kind of wrong key. Each request would succeed if its check were
// missing. No refusal changes anything or calls a machine.
import { createHash, generateKeyPairSync } from 'node:crypto';
import { dirname } from 'node:path';
import { Client, credentials, status as grpcStatus, Metadata } from '@grpc/grpc-js';
import { expect, test, vi } from 'vitest';
import { callKey, linkServerName, linkService, methods, streamsService } from '../../shared/agent-rpcs.ts';
import { type Route, type Scope, scopes } from '../../shared/api/route.ts';
import { api } from '../../shared/api/route-table.ts';
import type { IdNoun } from '../../shared/api/shared-schemas.ts';
import { rawPublicKey } from '../../shared/identity-proof.ts';
import {
  type Ask,
  addressOf,
  ask,
  expectRefusals,
  type Ids,
  inParts,
  keyed,
  type Limit,
  malformed,
  type Named,
  onMachine,
  placesIn,
  reached,
  refusalIn,
  type Scene,
  startScene,
} from '../all-routes.ts';
import { caOf } from '../grpc-fixture.ts';

// Some thousand requests take long on a busy machine.
vi.setConfig({ testTimeout: 60_000 });

// ---- Wrong keys

type Stranger = [what: string, authorization: string | undefined];

/** Kinds of wrong keys, by name. */
async function strangers({ system }: Scene): Promise<Stranger[]> {
  const { client, key } = system;
  const expired = await client.keys.create({
    name: 'expired',
    scopes: ['admin'],
    expires_at: '2001-01-01T00:00:00Z',
  });
  const revoked = await client.keys.create({ name: 'revoked', scopes: ['admin'] });
  await client.keys.remove({ key_id: revoked.id });
  return [
    ['no key', undefined],
    ['an unknown key', `Bearer service_apikey_${'0'.repeat(43)}`],
    ['another scheme', `Basic ${btoa(`user:${key}`)}`],
    ['the stored form of a key', `Bearer service_apikey_${createHash('sha256').update(key).digest('hex')}`],
    ['the name of the local socket', 'Bearer key_local'],
    ['an expired key', `Bearer ${expired.key}`],
    ['a revoked key', `Bearer ${revoked.key}`],
  ];
}

/** More kinds of wrong keys, tested on a few routes only, because all routes read the key in the same way. */
async function oddities({ system, here }: Scene): Promise<Stranger[]> {
  const { client, key } = system;
  const { token } = await client.joinTokens.create({ name: 'no key' });
  return [
    ['an empty key', 'Bearer '],
    ['no scheme', key],
    ['two keys', `Bearer ${key} ${key}`],
    ['two keys with a comma', `Bearer ${key}, Bearer ${key}`],
    ['garbage', 'Bearer \xff\xfe%00{}'],
    ['a key without its literal', `Bearer ${key.replace('service_apikey_', '')}`],
    ['a key in other letters', `Bearer ${key.toUpperCase()}`],
    ['a key and more', `Bearer ${key}0`],
    ['a key without its end', `Bearer ${key.slice(0, -1)}`],
    ['the bare hash of a key', `Bearer ${createHash('sha256').update(key).digest('hex')}`],
    ['the id of a key', `Bearer ${here.key}`],
    ['the literal alone', 'Bearer service_apikey_'],
    ['the name of the local socket with the literal', 'Bearer service_apikey_key_local'],
    ['a join token', `Bearer ${token}`],
  ];
}

/** Creates for each scope a key with all other scopes, except admin, which includes every scope. */
async function keysWithout({ system }: Scene): Promise<Map<string, string>> {
  const made = scopes.map(async (needed) => {
    const others = scopes.filter((scope) => scope !== needed && scope !== 'admin');
    return [needed, (await system.keyed(others)).key] as const;
  });
  return new Map(await Promise.all(made));
}

const limits = ['machine_ids', 'tags'] as const;

/** Creates keys that are limited to one machine. Returns a function that returns the key for a scope. */
async function limitedKeys({ limited }: Scene): Promise<(scope: string, by: Limit) => string> {
  const every = scopes.filter((scope) => scope !== 'admin');
  const of = async (by: Limit) => ({ plain: await limited(every, by), admin: await limited(['admin'], by) });
  const keys = { machine_ids: await of('machine_ids'), tags: await of('tags') };
  return (scope, by) => (scope === 'admin' ? keys[by].admin : keys[by].plain);
}

// ---- REST

interface Case {
  /** Name of the case, such as `files.read with an expired key`. */
  asked: string;
  route: Route;
  params: Ask;
  expected: string;
  details?: Record<string, unknown>;
}

async function withoutKey(scene: Scene, routes: Named[]): Promise<Case[]> {
  const { key } = scene.system;
  const expected = '401 unauthorized';
  const [everywhere, somewhere] = [await strangers(scene), await oddities(scene)];
  const samples = ['machines.list', 'commands.create', 'files.upload', 'keys.remove', 'service.metrics'];
  const elsewhere = { 'X-Api-Key': key, Cookie: `key=${key}`, 'Proxy-Authorization': `Bearer ${key}` };
  return routes.flatMap(({ name, route }) => [
    ...[...everywhere, ...(samples.includes(name) ? somewhere : [])].map(([what, Authorization]) => ({
      asked: `${name} with ${what}`,
      route,
      params: { key: null, ...(Authorization !== undefined && { headers: { Authorization } }) },
      expected,
    })),
    {
      asked: `${name} with a key anywhere but there, and everything wrong`,
      route,
      params: {
        key: null,
        headers: elsewhere,
        query: wrongQuery(key),
        ...(route.body && { body: malformed }),
      },
      expected,
    },
  ]);
}

const wrongQuery = (key: string) => ({ limit: 'x', key, api_key: key, access_token: key, ticket: key });

async function withoutScope(scene: Scene, routes: Named[]): Promise<Case[]> {
  const keys = await keysWithout(scene);
  return routes.flatMap(({ name, route }) => {
    const key = keys.get(route.access);
    if (key === undefined) return [];
    const refused = { route, expected: '403 forbidden', details: { required_scope: route.access } };
    return [
      { asked: `${name} without its scope`, ...refused, params: { key } },
      {
        asked: `${name} without its scope, and wrong`,
        ...refused,
        params: { key, query: { limit: 'x' }, ...(route.body && { body: malformed }) },
      },
    ];
  });
}

async function withoutReach(scene: Scene, routes: Named[]): Promise<Case[]> {
  const { here, there } = scene;
  const keyOf = await limitedKeys(scene);
  return routes.flatMap(({ name, route }) =>
    placesIn(route)
      .filter(({ noun }) => onMachine[noun])
      .flatMap(({ at, noun }) =>
        limits.flatMap((by) => {
          // Each route with the id of a machine, or of an object on a machine, requires a scope. So `access` is a scope
          // here.
          const params = { key: keyOf(route.access, by), ids: here };
          const refused = { route, expected: '403 forbidden' };
          const foreign = { swap: { at, id: there[noun] } };
          const unknown = { swap: { at, id: 'mach_never' } };
          const received = (id: string) => ({ details: { [`${noun}_id`]: id } });
          const asked = `${name} limited by ${by}, ${at}`;
          return [
            { asked, ...refused, params: { ...params, ...foreign }, ...received(there[noun]) },
            ...(at.startsWith('body') || !route.body
              ? []
              : [
                  {
                    asked: `${asked}, and wrong`,
                    ...refused,
                    params: { ...params, ...foreign, body: malformed },
                  },
                ]),
            // The answer must not reveal whether a machine beyond the key's limit exists.
            ...(noun === 'machine'
              ? [
                  {
                    asked: `${asked}, which does not exist`,
                    ...refused,
                    params: { ...params, ...unknown },
                    ...received('mach_never'),
                  },
                ]
              : []),
          ];
        }),
      ),
  );
}

test.each(inParts(2))(
  'every route refuses every kind of wrong key, changes nothing, and calls no machine',
  async (...routes) => {
    const scene = await startScene();
    const cases = [
      ...(await withoutKey(scene, routes)),
      ...(await withoutScope(scene, routes)),
      ...(await withoutReach(scene, routes)),
    ];
    expect(new Set(cases.map(({ route }) => route)).size).toBe(routes.length);
    await expectRefusals(scene, cases, async ({ asked, route, params, expected, details }) => {
      const answer = await ask(scene, route, params);
      const challenge = answer.headers.get('www-authenticate');
      const received = [refusalIn(answer), challenge, ...(details ? [answer.body.error?.details] : [])];
      const demanded = [
        expected,
        expected.startsWith('401') ? 'Bearer' : null,
        ...(details ? [details] : []),
      ];
      return [asked, JSON.stringify(received), JSON.stringify(demanded)];
    });
    for (const { name, route } of routes.filter(({ route }) => route.method === 'GET')) {
      const response = await fetch(`${scene.system.url}${route.base}${route.path}`, { method: 'HEAD' });
      expect([name, response.status, await response.text()]).toEqual([name, 401, '']);
    }
  },
);

/** Returns what some routes need beyond their schema: other parameters, or a call before the request. */
function extrasByRoute({
  known,
  here,
  system,
  channelDelivery,
}: Scene): Record<string, { params?: Ask; first?(): Promise<unknown> }> {
  const { path = '' } = known;
  const write = () => system.client.files.write({ machine_id: here.machine, path, content: '' });
  return {
    // A request that changes nothing would not be recorded.
    'machines.update': { params: { body: { name: 'renamed' } } },
    'files.change': { params: { body: { path, mode: '0644' } } },
    'files.mkdir': { params: { body: { path: `${path}.made` } } },
    'files.copy': { params: { body: { source: path, destination: `${path}.copy` } } },
    'files.search': { params: { query: { name: '*', path: dirname(path) } } },
    'files.extract': { params: { query: { path: dirname(path) } } },
    // The route that reads the file comes before the route that writes it, so the file is written first.
    'files.read': { first: write },
    // A login can be confirmed only with its own key, which is the broker's first key.
    'logins.confirm': { params: { key: system.key } },
    'files.removeAnywhere': { first: write },
    'maintenanceWindows.create': {
      params: { body: { name: 'now', machine_ids: [here.machine], duration: 60_000 } },
    },
    'savedCommands.update': { params: { body: { timeout: 1000 } } },
    // A saved command that a schedule uses cannot be removed, so the schedules are changed first.
    'savedCommands.remove': {
      async first() {
        const used = { saved_command_id: here.saved_command };
        for (const { id } of (await system.client.schedules.list(used)).items)
          await system.client.schedules.update({ schedule_id: id, command: 'true' });
      },
    },
    // A channel that rules name cannot be removed, so the rules are changed first.
    'alertChannels.remove': {
      async first() {
        for (const { id } of (await system.client.alertRules.list()).items)
          await system.client.alertRules.update({ rule_id: id, channel_ids: null });
      },
    },
    'alertChannels.redeliver': { params: { ids: { ...here, delivery: channelDelivery } } },
  };
}

test('the same requests succeed with the right key, and the machine gets their calls', async () => {
  const scene = await startScene();
  // Removals come last, and machines last of all, because a removed machine takes its objects with it.
  const order = (name: string): number =>
    Number(/remove|cancel|sessions\.end/.test(name)) + Number(name === 'machines.remove');
  const sorted = keyed.toSorted((a, b) => order(a.name) - order(b.name));
  const { key } = await scene.system.keyed([...scopes]);
  const extras = extrasByRoute(scene);
  const received: unknown[] = [];
  const recorded: unknown[] = [];
  for (const { name, route } of sorted) {
    await extras[name]?.first?.();
    received.push([
      name,
      ...(await outcomeOf(scene, route, { key, ids: scene.here, ...extras[name]?.params })),
    ]);
    if (route.kind === 'events') continue;
    const { items } = await scene.system.client.audit.list({ request_id: scene.requestIds.at(-1) ?? '' });
    recorded.push([name, items.map(({ action, result, address }) => [action, result, address])]);
  }
  expect(received).toEqual(sorted.map(({ name, route }) => [name, route.status, undefined]));
  // Only requests that change or run something are recorded, each once.
  expect(recorded).toEqual(
    sorted
      .filter(({ route }) => route.kind !== 'events')
      .map(({ name, route }) => [name, route.method === 'GET' ? [] : [[name, 'ok', '127.0.0.1']]]),
  );
  expect(reached(scene, scene.requestIds).length).toBeGreaterThan(20);
});

/**
 * Returns the status and error code of an answer. A stream of events does not end by itself, so the test aborts it when
 * its head has arrived.
 */
async function outcomeOf(scene: Scene, route: Route, params: Ask): Promise<[status: number, code: unknown]> {
  const enough = new AbortController();
  if (route.kind !== 'events') {
    const { status, body } = await ask(scene, route, params);
    return [status, body.error?.code];
  }
  const response = await fetch(addressOf(scene, route, params), {
    headers: { Authorization: `Bearer ${params.key}` },
    signal: enough.signal,
  });
  enough.abort();
  return [response.status, undefined];
}

// ---- gRPC

interface Rpc {
  route: Route;
  noun: IdNoun;
  messages(ids: Ids, scene: Scene): object[];
}

/** For each gRPC method, the route that needs the same rights, and a call that would have an effect. */
const rpcs: Record<string, Rpc> = {
  Exec: {
    route: api.commands.create,
    noun: 'machine',
    messages: ({ machine: machine_id }, { known: { command } }) => [{ start: { machine_id, command } }],
  },
  FollowCommand: {
    route: api.commands.stream,
    noun: 'command',
    messages: ({ command: command_id }) => [{ command_id }],
  },
  AttachSession: {
    route: api.sessions.attach,
    noun: 'session',
    messages: ({ session: session_id }) => [{ open: { session_id } }],
  },
  ReadFile: {
    route: api.files.download,
    noun: 'machine',
    messages: ({ machine: machine_id }) => [{ machine_id, path: '/etc/os-release' }],
  },
  WriteFile: {
    route: api.files.put,
    noun: 'machine',
    messages: ({ machine: machine_id }, { known: { path } }) => [
      { open: { machine_id, path } },
      { commit: {} },
    ],
  },
  WatchFiles: {
    route: api.files.watch,
    noun: 'machine',
    messages: ({ machine: machine_id }, { folder }) => [{ machine_id, path: folder }],
  },
  Events: {
    route: api.events.stream,
    noun: 'machine',
    messages: ({ machine: machine_id }) => [{ machine_id }],
  },
};

interface Received {
  code: grpcStatus;
  farhand: string;
  details: Record<string, unknown>;
  came: Buffer[];
}

interface Ring {
  path: string;
  messages: Buffer[];
  headers: Record<string, string>;
  /** If true, an answer that has begun counts as success, and the test cancels the call. */
  begun?: boolean;
  /** If true, the client leaves its side of the call open. */
  open?: boolean;
}

/** Returns a function that makes a call on a connection of its own, with messages as raw bytes. */
async function dialler(scene: Scene): Promise<(ring: Ring) => Promise<Received>> {
  const ca = credentials.createSsl(Buffer.from(await caOf(scene.system)));
  const options = { 'grpc.ssl_target_name_override': linkServerName, 'grpc.use_local_subchannel_pool': 1 };
  return async ({ path, messages, headers, begun, open }) => {
    const client = new Client(scene.system.grpc, ca, options);
    const metadata = new Metadata();
    for (const [name, value] of Object.entries(headers)) metadata.set(name, value);
    const same = (bytes: Buffer): Buffer => bytes;
    const stream = client.makeBidiStreamRequest(path, same, same, metadata);
    const came: Buffer[] = [];
    stream.on('error', () => undefined);
    stream.on('data', (bytes: Buffer) => came.push(bytes));
    for (const message of messages) stream.write(message);
    if (!open) stream.end();
    try {
      return await new Promise((resolve) => {
        stream.once('metadata', (first: Metadata) => {
          if (begun && first.get('farhand-request-id').length > 0)
            resolve({ code: grpcStatus.OK, farhand: '', details: {}, came });
        });
        stream.once('status', ({ code, metadata: last }) => {
          const text = (name: string): string => String(last.get(name)[0] ?? '');
          scene.requestIds.push(text('farhand-request-id'));
          const details = JSON.parse(text('farhand-details') || '{}');
          resolve({ code, farhand: text('farhand-code'), details, came });
        });
      });
    } finally {
      stream.cancel();
      client.close();
    }
  };
}

/** The services of the broker as grpc-js defines them. */
interface Definition {
  path: string;
  requestStream: boolean;
  requestSerialize(message: object): Buffer;
  responseDeserialize(bytes: Buffer): { message?: string };
}
type Definitions = Record<string, Definition>;
const definitionsOf = (service: unknown): [string, Definitions[string]][] =>
  Object.entries(service as Definitions);

const streams = definitionsOf(streamsService);
const authorized = (authorization: string): Record<string, string> => ({ authorization });

interface RpcCase {
  asked: string;
  path: string;
  messages: Buffer[];
  headers: Record<string, string>;
  expected: string;
  details?: Record<string, unknown>;
}

async function rpcCases(scene: Scene): Promise<RpcCase[]> {
  const { here, there, system } = scene;
  const [without, limited, wrong] = [
    await keysWithout(scene),
    await limitedKeys(scene),
    await strangers(scene),
  ];
  return streams.flatMap(([name, { path, requestSerialize }]) => {
    const rpc = rpcs[name];
    if (!rpc) throw new Error(`${name} has no example in this test`);
    const { route, noun } = rpc;
    const messages = rpc.messages(there, scene).map(requestSerialize);
    const call = { path, messages };
    const access = route.access as Scope;
    const foreign = { ...here, [noun]: noun === 'machine' ? 'mach_never' : there[noun] };
    return [
      ...wrong.map(([what, authorization]) => ({
        asked: `${name} with ${what}`,
        ...call,
        headers: authorization === undefined ? {} : authorized(authorization),
        expected: 'UNAUTHENTICATED unauthorized',
      })),
      {
        asked: `${name} with a key in other metadata`,
        ...call,
        headers: {
          'x-api-key': system.key,
          cookie: system.key,
          'proxy-authorization': `Bearer ${system.key}`,
        },
        expected: 'UNAUTHENTICATED unauthorized',
      },
      {
        asked: `${name} without its scope`,
        ...call,
        headers: authorized(`Bearer ${without.get(access)}`),
        expected: 'PERMISSION_DENIED forbidden',
        details: { required_scope: access },
      },
      ...limits.flatMap((by) => {
        const refused = {
          path,
          headers: authorized(`Bearer ${limited(access, by)}`),
          expected: 'PERMISSION_DENIED forbidden',
        };
        return [
          {
            asked: `${name} limited by ${by}`,
            ...refused,
            messages,
            details: { [`${noun}_id`]: there[noun] },
          },
          {
            asked: `${name} limited by ${by}, and another id`,
            ...refused,
            messages: rpc.messages(foreign, scene).map(requestSerialize),
            details: { [`${noun}_id`]: foreign[noun] },
          },
        ];
      }),
    ];
  });
}

test('every rpc of clients refuses every kind of wrong key, changes nothing, and calls no machine', async () => {
  const scene = await startScene();
  const ring = await dialler(scene);
  const cases = await rpcCases(scene);
  await expectRefusals(scene, cases, async ({ asked, path, messages, headers, expected, details = {} }) => {
    const { code, farhand, details: given, came } = await ring({ path, messages, headers });
    const received = [`${grpcStatus[code]} ${farhand}`, given, came.length];
    return [asked, JSON.stringify(received), JSON.stringify([expected, details, 0])];
  });
});

test('with the right key the same calls begin', async () => {
  const scene = await startScene();
  const ring = await dialler(scene);
  for (const [name, { path, requestSerialize, requestStream }] of streams) {
    const rpc = rpcs[name];
    const { key } = await scene.system.keyed([rpc?.route.access as Scope], { tags: ['here'] });
    const messages = rpc?.messages(scene.here, scene).map(requestSerialize) ?? [];
    const headers = authorized(`Bearer ${key}`);
    const received = await ring({ path, messages, headers, begun: true, open: requestStream });
    expect([name, grpcStatus[received.code], received.farhand]).toEqual([name, 'OK', '']);
  }
});

// ---- The services for agents

/**
 * For each method of the service for agents: messages of a client that is not an agent, each with the answer that it
 * must get.
 */
async function linkMessages({ system, there }: Scene): Promise<Record<string, [object, string][]>> {
  const used = await system.joinToken();
  await system.agent({ name: 'joined', joinToken: used });
  const expired = await system.client.joinTokens.create({ name: 'expired', expires_in: 60_000 });
  const removed = await system.client.joinTokens.create({ name: 'removed' });
  await system.client.joinTokens.remove({ join_token_id: removed.id });
  const secretOf = (token: string): string => /^farhand_join_(\w+)\./.exec(token)?.[1] ?? '';
  const hashed = createHash('sha256').update(secretOf(expired.token)).digest('hex');
  const secrets = [
    system.key,
    'x'.repeat(43),
    used,
    secretOf(used),
    secretOf(removed.token),
    expired.id,
    hashed,
  ];
  const host = { hostname: 'h', os: 'linux', arch: 'x64' };
  const params = { public_key: strangersKey(), name: 'intruder', host, agent_version: '1' };
  const signed = { protocol: 1, signature: Buffer.alloc(64), methods: [...methods.keys()] };
  const hello = { ...signed, boot_id: 'b', instance_id: 'i', journal_id: 'j', host };
  return {
    Enroll: [
      ...secrets.map((token): [object, string] => [{ ...params, token }, 'UNAUTHENTICATED']),
      [{ ...params, token: '' }, 'INVALID_ARGUMENT'],
    ],
    Connect: [
      [{ hello: { ...hello, machine_id: there.machine } }, 'UNAUTHENTICATED: challenge'],
      [{ hello: { ...hello, machine_id: `mach_${'0'.repeat(22)}` } }, 'OK: challenge removed'],
      [{ hello: { ...hello, machine_id: 'mach_never' } }, 'INVALID_ARGUMENT: challenge'],
      [{ hello: { ...hello, machine_id: '' } }, 'INVALID_ARGUMENT: challenge'],
      [{ heartbeat: {} }, 'INVALID_ARGUMENT: challenge'],
      [{ reply: { call_id: 'call_x', response: Buffer.alloc(1) } }, 'INVALID_ARGUMENT: challenge'],
    ],
    Answer: [
      [{ message: Buffer.alloc(1) }, 'NOT_FOUND'],
      [{ end: {} }, 'NOT_FOUND'],
    ],
  };
}

const strangersKey = (): Buffer => rawPublicKey(generateKeyPairSync('ed25519').publicKey);

test('the link refuses every client without a join token or a machine’s key, even with an admin key', async () => {
  const scene = await startScene();
  const messages = await linkMessages(scene);
  const ring = await dialler(scene);
  const requests = [
    {},
    authorized(`Bearer ${scene.system.key}`),
    { [callKey]: 'call_0000000000000000000000' },
  ];
  const cases = definitionsOf(linkService).flatMap(([name, definition]) => {
    const own = messages[name];
    if (!own) throw new Error(`${name} has no example in this test`);
    return own.flatMap(([message, expected]) =>
      requests.map((headers) => ({ name, definition, message, headers, expected })),
    );
  });
  await expectRefusals(scene, cases, async ({ name, definition, message, headers, expected }) => {
    const { path, requestSerialize, responseDeserialize } = definition;
    const { code, came } = await ring({ path, headers, messages: [requestSerialize(message)] });
    const kinds = came.map((bytes) => ` ${responseDeserialize(bytes).message}`);
    const received = `${grpcStatus[code]}${kinds.length > 0 ? ':' : ''}${kinds.join('')}`;
    return [
      `${name} ${Object.keys(headers).join()} ${JSON.stringify(message).slice(0, 60)}`,
      received,
      expected,
    ];
  });
  const { items } = await scene.system.client.machines.list();
  expect(items.map(({ name }) => name).sort()).toEqual(['here', 'joined', 'there']);
});

test('no client can call the methods of agents, whichever key it has', async () => {
  const scene = await startScene();
  const ring = await dialler(scene);
  const headers = authorized(`Bearer ${scene.system.key}`);
  const paths = [
    ...[...methods.keys()].map((name) => `/farhand.agent.v1.Agent/${name}`),
    '/grpc.reflection.v1.ServerReflection/ServerReflectionInfo',
    '/farhand.client.v1.Streams/exec',
    '/farhand.client.v1.Streams/Exec/',
    '//farhand.client.v1.Streams/Exec',
    '/Farhand.Client.V1.Streams/Exec',
    '/farhand.client.v1.Streams/../Streams/Exec',
  ];
  await expectRefusals(scene, paths, async (path) => {
    const { code } = await ring({ path, messages: [], headers });
    return [path, grpcStatus[code], 'UNIMPLEMENTED'];
  });
});

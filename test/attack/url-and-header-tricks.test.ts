// Requests that proxies and frameworks may read differently from the broker. Disguised paths, methods and headers must
// not change the rights. Requests are sent as raw bytes, because clients would normalize them.
import { once } from 'node:events';
import { Agent, type IncomingMessage, request } from 'node:http';
import { connect } from 'node:net';
import { onTestFinished, test, vi } from 'vitest';
import { type Route, scopes } from '../../shared/api/route.ts';
import {
  addressOf,
  expectRefusals,
  inParts,
  keyed,
  type Named,
  rawOf,
  type Scene,
  startScene,
} from '../all-routes.ts';

// Some thousand requests take long on a busy machine.
vi.setConfig({ testTimeout: 60_000 });

interface Sent {
  method: string;
  target: string;
  /** Names and values alternate. A name may occur several times. */
  headers: string[];
  body?: string | undefined;
}

/** Sends requests unchanged, over persistent connections. */
function sender(scene: Scene): (sent: Sent) => Promise<number> {
  const agent = new Agent({ keepAlive: true, maxSockets: 4 });
  onTestFinished(() => agent.destroy());
  const { hostname: host, port } = new URL(scene.system.url);
  return async ({ method, target, headers, body }) => {
    const length = body === undefined ? [] : ['Content-Length', String(Buffer.byteLength(body))];
    const all = ['Host', 'broker', ...headers, ...length];
    const asked = request({ host, port, agent, method, path: target, headers: all });
    asked.end(body);
    const [answer] = (await once(asked, 'response')) as [IncomingMessage];
    scene.requestIds.push(String(answer.headers['x-request-id']));
    answer.resume();
    if (!answer.complete) await once(answer, 'end');
    return answer.statusCode ?? 0;
  };
}

/** Returns other spellings of a path. */
function disguises(path: string): string[] {
  const last = path.lastIndexOf('/') + 1;
  return [
    `/${path}`,
    `${path}/`,
    `${path}//`,
    `${path}/.`,
    `${path};x`,
    `${path}%20`,
    `${path}%00`,
    `${path}%2f`,
    `${path}#x`,
    `/.${path}`,
    `/healthz/..${path}`,
    `/healthz${path}`,
    `/docs/%2e%2e${path}`,
    `/docs/..%2f${path.slice(1)}`,
    path.replace('/api/v1/', '/api/v1//'),
    path.replace('/api/v1/', '/api/v1/./'),
    path.replace('/api/v1/', '/api/v1/x/%2E%2E/'),
    path.replace('/api/v1/', '/API/V1/'),
    path.replaceAll('/', '%2F'),
    path.replaceAll('/', '\\'),
    `${path.slice(0, last)}%${path.charCodeAt(last).toString(16)}${path.slice(last + 1)}`,
    `http://broker${path}`,
    `http://user:password@broker/healthz/..${path}`,
  ];
}

const pretences: string[][] = [
  ['X-HTTP-Method-Override', 'GET', 'X-HTTP-Method', 'GET', 'X-Method-Override', 'GET'],
  ['X-Original-URL', '/healthz', 'X-Rewrite-URL', '/healthz', 'X-Forwarded-Prefix', '/docs'],
  [
    ...[
      'X-Forwarded-For',
      '127.0.0.1',
      'X-Real-IP',
      '127.0.0.1',
      'Forwarded',
      'for=127.0.0.1;host=localhost',
    ],
    ...['X-Forwarded-Host', 'localhost', 'Origin', 'null', 'Sec-Fetch-Site', 'same-origin'],
  ],
];

/** HEAD is left out, because every-route-wrong-keys.test.ts tests it. */
const strangeMethods = ['OPTIONS', 'TRACE', 'PROPFIND', 'PURGE'];

const bearer = (key: string): string[] => ['Authorization', `Bearer ${key}`];

/** A valid request of a route, with existing ids. It would succeed if a check were missing. */
function genuine(
  scene: Scene,
  route: Route,
): { path: string; query: string; body: string | undefined; type: string[] } {
  const { pathname, search } = new URL(addressOf(scene, route));
  const { body } = rawOf(route, scene.there, scene.known);
  const text = body === undefined || route.accepts ? undefined : JSON.stringify(body);
  return {
    path: pathname,
    query: search,
    body: text,
    type: text ? ['Content-Type', 'application/json'] : [],
  };
}

/** Creates for each scope a key with all other scopes, except admin. */
async function weakKeys({ system }: Scene): Promise<Map<string, string>> {
  const made = scopes.map(async (needed) => {
    const others = scopes.filter((scope) => scope !== needed && scope !== 'admin');
    return [needed, (await system.keyed(others)).key] as const;
  });
  return new Map(await Promise.all(made));
}

interface Case extends Sent {
  asked: string;
  /** Statuses that count as a refusal. */
  refused: number[];
}

/**
 * Clients to try: one without a key and, for routes that change something, one with every scope except the required
 * one.
 */
function askersOf({ access, method }: Route, weak: Map<string, string>) {
  const stranger = { who: 'a stranger', refused: [400, 401], own: [] as string[] };
  const key = method === 'GET' ? undefined : weak.get(access);
  if (key === undefined) return [stranger];
  return [stranger, { who: 'a weak key', refused: [400, 403, 404, 405], own: bearer(key) }];
}

const casesOf = (scene: Scene, routes: Named[], weak: Map<string, string>): Case[] =>
  routes.flatMap(({ name, route }) => {
    const { method } = route;
    const { path, query, body, type } = genuine(scene, route);
    const target = path + query;
    const second = bearer(scene.system.key);
    return askersOf(route, weak).flatMap(({ who, refused, own }) => {
      const headers = [...type, ...own];
      const plain = { method, target, headers, body, refused };
      return [
        ...disguises(path).map((disguise) => ({
          ...plain,
          asked: `${name} as ${disguise} by ${who}`,
          target: disguise + query,
          // The files of the reference page, below /docs, need no key. So a disguised path there must be refused with
          // 404, not 401.
          refused: /^\/docs\/[^/]+$/.test(disguise) ? [404] : refused,
        })),
        ...pretences.map((pretence) => ({
          ...plain,
          asked: `${name} with ${pretence[0]} by ${who}`,
          headers: [...headers, ...pretence],
        })),
        {
          ...plain,
          asked: `${name} with a second key by ${who}`,
          headers: [...(own.length > 0 ? headers : ['Authorization', 'Bearer x', ...type]), ...second],
        },
      ];
    });
  });

test.each(inParts(4))(
  'no disguise of a path, a method or a key gives a client more rights, on any route',
  async (...routes) => {
    const scene = await startScene();
    const send = sender(scene);
    const cases = casesOf(scene, routes, await weakKeys(scene));
    await expectRefusals(scene, cases, async ({ asked, refused, ...sent }) => {
      const status = await send(sent);
      return [asked, refused.includes(status) ? 'refused' : String(status), 'refused'];
    });
  },
);

test('unknown methods do nothing, even with an admin key', async () => {
  const scene = await startScene();
  const send = sender(scene);
  const cases = keyed.flatMap(({ name, route }) => strangeMethods.map((method) => ({ name, route, method })));
  await expectRefusals(scene, cases, async ({ name, route, method }) => {
    const { path, query } = genuine(scene, route);
    const target = path + query;
    const without = await send({ method, target, headers: [] });
    const status = await send({ method, target, headers: bearer(scene.system.key) });
    return [`${name} with ${method}`, `${without} ${status}`, '401 405'];
  });
});

/** Returns the statuses of all answers until the broker closes the connection. */
async function wire({ system }: Scene, text: string): Promise<number[]> {
  const { hostname, port } = new URL(system.url);
  const socket = connect(Number(port), hostname);
  const chunks: Buffer[] = [];
  socket.on('error', () => undefined);
  socket.on('data', (chunk: Buffer) => chunks.push(chunk));
  socket.end(text);
  if (!socket.closed) await once(socket, 'close');
  return [
    ...Buffer.concat(chunks)
      .toString('latin1')
      .matchAll(/^HTTP\/1\.1 (\d+)/gm),
  ].map(([, status]) => Number(status));
}

test('a request hidden in the body of another request is never executed, however the length is declared', async () => {
  const scene = await startScene();
  const { key } = await scene.system.keyed(['machines:read']);
  const target = `/api/v1/machines/${scene.there.machine}`;
  const hidden = `DELETE ${target} HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer ${scene.system.key}\r\n\r\n`;
  const open = `PATCH ${target} HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer ${key}\r\nContent-Type: application/json\r\n`;
  const length = `Content-Length: ${hidden.length}\r\n`;
  const chunked = 'Transfer-Encoding: chunked\r\n';
  const texts = {
    'length and chunks': `${open}${length}${chunked}\r\n0\r\n\r\n${hidden}`,
    'chunks and length': `${open}${chunked}${length}\r\n0\r\n\r\n${hidden}`,
    'two lengths': `${open}${length}Content-Length: 0\r\n\r\n${hidden}`,
    'a length with a sign': `${open}Content-Length: +${hidden.length}\r\n\r\n${hidden}`,
    'chunks in other words': `${open}Transfer-Encoding: xchunked\r\n${length}\r\n${hidden}`,
    'chunks not last': `${open}Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n${hidden}`,
    'a space before the colon': `${open}Content-Length : 0\r\n${length}\r\n${hidden}`,
    'a bare line feed': `${open}X: y\n${chunked}${length}\r\n0\r\n\r\n${hidden}`,
    'a folded header': `${open}X: y\r\n ${chunked}${length}\r\n${hidden}`,
    'the older protocol': `${open.replace('HTTP/1.1', 'HTTP/1.0')}${length}\r\n${hidden}`,
    'a chunk with a wrong size': `${open}${chunked}\r\n1\r\n{}\r\n0\r\n\r\n${hidden}`,
  };
  await expectRefusals(scene, Object.entries(texts), async ([what, text]) => {
    const received = await wire(scene, text);
    return [
      what,
      received.every((status) => [400, 403].includes(status)) ? 'refused' : String(received),
      'refused',
    ];
  });
});

test('HTTP/1.0 needs the same key', async () => {
  const scene = await startScene();
  const weak = await weakKeys(scene);
  const changing = keyed.filter(({ route }) => route.method !== 'GET');
  await expectRefusals(scene, changing, async ({ name, route }) => {
    const { path, query } = genuine(scene, route);
    const line = `${route.method} ${path}${query} HTTP/1.0\r\n`;
    const without = await wire(scene, `${line}\r\n`);
    const key = weak.get(route.access);
    const weaker =
      key === undefined ? [403] : await wire(scene, `${line}Authorization: Bearer ${key}\r\n\r\n`);
    return [name, String([...without, ...weaker]), '401,403'];
  });
});

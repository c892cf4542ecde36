// The connections of the command line: a broker that is silent for longer than fetch waits or ends during a request, and
// a proxy.
import { once } from 'node:events';
import { createServer, type ServerResponse } from 'node:http';
import { join } from 'node:path';
import { afterEach, expect, onTestFinished, test, vi } from 'vitest';
import { withSocket } from '../broker/cli/call-or-start-local-broker.ts';
import { createTransport } from '../broker/cli/pinned-transport.ts';
import { atEnd } from './close-after-tests.ts';
import { listenOnLoopback } from './listen-on-loopback.ts';
import { temporaryFolder } from './start-farhand.ts';

afterEach(() => void vi.useRealTimers());

/** Makes the timers of undici believe that more than its time limit of 300 s has passed. */
function passSixMinutes(): void {
  vi.advanceTimersByTime(360_000);
}

test('an answer and its next byte may take longer than the 300 s that fetch waits', async () => {
  const server = createServer();
  const url = `http://127.0.0.1:${await listenOnLoopback(server)}`;
  atEnd(() => server.closeAllConnections());
  vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout'] });
  const { options, close } = createTransport({});
  const asked = once(server, 'request');
  const answer = options.fetch(url);
  const response = (await asked)[1] as ServerResponse;
  passSixMinutes();
  response.write('one');
  const reader = (await answer).body?.getReader();
  expect(Buffer.from((await reader?.read())?.value ?? '').toString()).toBe('one');
  const next = reader?.read();
  passSixMinutes();
  response.end('two');
  expect(Buffer.from((await next)?.value ?? '').toString()).toBe('two');
  await close();
});

test('requests go through the proxy of the environment if NODE_USE_ENV_PROXY is set, as those of fetch do', async () => {
  const server = createServer(({ url }, response) => response.end(url));
  vi.stubEnv('NODE_USE_ENV_PROXY', '1');
  vi.stubEnv('http_proxy', `http://127.0.0.1:${await listenOnLoopback(server)}`);
  onTestFinished(() => void vi.unstubAllEnvs());
  const { options, close } = createTransport({});
  expect(await (await options.fetch('http://broker.example/')).text()).toBe('http://broker.example/');
  await close();
});

test('a local broker that ends while it makes a backup is an error without a stack trace', async () => {
  const server = createServer((request, response) => {
    if (request.method === 'POST') request.socket.destroy();
    else response.end('ok');
  });
  const dataDir = temporaryFolder('broker');
  await once(server.listen(join(dataDir, 'broker.sock')), 'listening');
  atEnd(() => void server.close());
  const made = withSocket(dataDir, (_client, post) => post('/local/backup'));
  await expect(made).rejects.toMatchObject({ name: 'FarhandError', code: 'no_answer' });
});

// Requests from pages of other origins. The browser adds the cookie of a login, but the broker refuses them.
import { once } from 'node:events';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { expect, onTestFinished } from 'vitest';
import { browserTest, newLogin, startMachine, startWithConsole } from './browser.ts';

/** Serves an empty page on another port of this machine, which is another origin on the same site. */
async function startOtherOrigin(): Promise<string> {
  const server = createServer((_request, response) => {
    response.setHeader('Content-Type', 'text/html');
    response.end(
      '<!doctype html><title>another</title><link rel="icon" href="data:,"><form method="post" enctype="text/plain"></form>',
    );
  }).listen(0, '127.0.0.1');
  await once(server, 'listening');
  onTestFinished(() => void server.close());
  const { port } = server.address() as AddressInfo;
  return `http://127.0.0.1:${port}`;
}

browserTest('a page on another port can neither read nor change anything, nor open a terminal', async () => {
  const system = await startWithConsole();
  const machine_id = await startMachine(system, 'web-1');
  const { session_id } = await system.client.sessions.create({ machine_id });
  const { context } = await newLogin(system);
  const page = await context.newPage();
  let statuses: number[] = [];
  let cookies = 0;
  const client = await context.newCDPSession(page);
  await client.send('Network.enable');
  client.on('Network.requestWillBeSentExtraInfo', ({ headers }) => {
    if (/__Host-farhand=/.test(headers.Cookie ?? headers.cookie ?? '')) cookies += 1;
  });
  client.on('Network.responseReceivedExtraInfo', ({ statusCode }) => statuses.push(statusCode));
  await page.goto(await startOtherOrigin());
  await expect.poll(() => statuses).toEqual([200]);
  statuses = [];
  cookies = 0;
  const api = JSON.stringify(`${system.url}/api/v1`);
  await page.evaluate(`(async () => {
    const send = (path, init) =>
      fetch(${api} + path, { mode: 'no-cors', credentials: 'include', ...init }).catch(() => {});
    await send('/machines');
    await send('/join-tokens', { method: 'POST', body: '{}', headers: { 'Content-Type': 'text/plain' } });
    await send('/sessions/${session_id}/attach', { method: 'POST', body: '{}' });
  })()`);
  await expect.poll(() => statuses).toEqual([403, 403, 403]);
  // The browser must have sent the cookie, or the test would prove nothing.
  expect(cookies).toBe(3);
  const socket = `${system.url.replace('http', 'ws')}/api/v1/sessions/${session_id}/stream?ticket=x`;
  const outcome = await page.evaluate<string>(`new Promise((resolve) => {
    const socket = new WebSocket(${JSON.stringify(socket)});
    socket.onopen = () => resolve('open');
    socket.onerror = () => resolve('refused');
  })`);
  expect(outcome).toBe('refused');
  await page.evaluate(`document.forms[0].action = ${api} + '/join-tokens'; document.forms[0].submit()`);
  await expect.poll(() => statuses).toHaveLength(4);
  expect(new Set(statuses)).toEqual(new Set([403]));
  // None of the requests has created a join token: the only token is that of the machine.
  expect((await system.client.joinTokens.list()).total).toBe(1);
});

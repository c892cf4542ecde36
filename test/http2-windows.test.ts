// HTTP/2 flow-control windows for a distant machine: they grow while a transfer is read, and stay small while it is
// not.
import { randomBytes } from 'node:crypto';
import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import { readFileSync, writeFileSync } from 'node:fs';
import type { Http2Session, Http2Stream, IncomingHttpHeaders } from 'node:http2';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { firstBytes } from '../shared/adapt-http2-windows.ts';
import { startFarhand, temporaryFolder } from './start-farhand.ts';
import { startProxy } from './tcp-proxy.ts';
import { waitFor } from './wait-for.ts';

const mebibyte = 1024 * 1024;

/**
 * A machine with a round trip of 50 ms. The file is sent to `receiver`: the agent (`client`) or the broker (`server`).
 * `window`, `largestWindow` and `unread` are measured at the receiver.
 */
async function distantMachine(receiver: 'client' | 'server') {
  const system = await startFarhand();
  const proxy = await startProxy(system.grpc, { delayMs: 25 });
  const streams: Http2Stream[] = [];
  let session: Http2Session | undefined;
  let largest = 0;
  const opened = (message: unknown): void => {
    const { stream, headers } = message as { stream: Http2Stream; headers: IncomingHttpHeaders };
    if (!headers[':path']?.endsWith('/Answer')) return;
    streams.push(stream);
    if (stream.session === session) return;
    session = stream.session;
    session?.on('localSettings', ({ initialWindowSize = 0 }) => {
      largest = Math.max(largest, initialWindowSize);
    });
  };
  const channel = `http2.${receiver}.stream.created`;
  subscribe(channel, opened);
  onTestFinished(() => void unsubscribe(channel, opened));
  const { machineId } = await system.agent({ through: proxy.address });
  const files = `${system.url}/api/v1/machines/${machineId}/files`;
  const call = (path: string, options: RequestInit = {}): Promise<Response> =>
    fetch(`${files}/${path}`, { ...options, headers: { Authorization: `Bearer ${system.key}` } });
  return {
    call,
    folder: temporaryFolder('flow'),
    largestWindow: () => largest,
    window: () => session?.localSettings.initialWindowSize,
    unread: () => streams.reduce((sum, stream) => sum + stream.readableLength, 0),
  };
}

test('32 downloads that stop after their first bytes leave at most 8 MiB unread in the broker', async () => {
  const { call, folder, unread, window } = await distantMachine('server');
  const file = join(folder, 'large');
  writeFileSync(file, randomBytes(48 * mebibyte));
  const answers = await Promise.all(Array.from({ length: 32 }, () => call(`download?path=${file}`)));
  expect(answers.map(({ status }) => status)).toEqual(answers.map(() => 200));
  // All downloads have stalled when no more bytes arrive.
  let before = -1;
  await waitFor(
    () => {
      const now = unread();
      const settled = now > 0 && now === before;
      before = now;
      expect(settled).toBe(true);
    },
    { timeout: 55_000, interval: 500 },
  );
  expect(unread()).toBeLessThanOrEqual(8 * mebibyte);
  await waitFor(() => expect(window()).toBe(firstBytes));
  for (const { body } of answers) await body?.cancel();
});

test('the window grows while a download is read, and is small again afterwards', async () => {
  const { call, folder, largestWindow, window } = await distantMachine('server');
  const file = join(folder, 'large');
  const content = randomBytes(32 * mebibyte);
  writeFileSync(file, content);
  const received = await (await call(`download?path=${file}`)).bytes();
  expect(content.equals(received)).toBe(true);
  expect(largestWindow()).toBeGreaterThan(4 * mebibyte);
  await waitFor(() => expect(window()).toBe(firstBytes));
});

test('the window of the agent grows while an upload is written', async () => {
  const { call, folder, largestWindow, window } = await distantMachine('client');
  const file = join(folder, 'large');
  const content = randomBytes(32 * mebibyte);
  const { status } = await call(`raw?path=${file}`, { method: 'PUT', body: content });
  expect(status).toBe(200);
  expect(readFileSync(file).equals(content)).toBe(true);
  expect(largestWindow()).toBeGreaterThan(4 * mebibyte);
  await waitFor(() => expect(window()).toBe(firstBytes));
});

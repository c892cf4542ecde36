// Slow readers of a command that writes more than the 64 MiB window. Each reader gets every byte, or is notified which
// bytes it missed.
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { once } from 'node:events';
import { get as httpGet, type IncomingMessage } from 'node:http';
import { expect, onTestFinished, test } from 'vitest';
import { bench, gate, leapingClock, output, soon } from '../commands-fixture.ts';
import type { TestSystem } from '../start-farhand.ts';

/**
 * Requests output with a client that reads only while the test resumes it. While the client is paused, its socket fills
 * up.
 */
async function pausedOutput({ url, key }: TestSystem, path: string): Promise<IncomingMessage> {
  const request = httpGet(`${url}/api/v1${path}`, { headers: { Authorization: `Bearer ${key}` } });
  onTestFinished(() => void request.destroy());
  const [response] = (await once(request, 'response')) as [IncomingMessage];
  response.on('error', () => undefined);
  return response;
}

test('a fast reader gets every byte while another is stalled, and the stalled one gets a gap', async () => {
  const { system, begin } = await bench();
  const { wait, open } = gate();
  const numbers = 'seq 1 15000000';
  const id = await begin(`${wait}; ${numbers}`);
  const slowBytes = await pausedOutput(system, `/commands/${id}/output?follow=true`);
  const slowEvents = await pausedOutput(system, `/commands/${id}/stream`);
  const fast = output(system, id, 'follow=true');
  open();
  const hash = createHash('sha256');
  for await (const piece of (await fast).body ?? []) hash.update(piece);
  expect(hash.digest('hex')).toBe(
    execFileSync('sh', ['-c', `${numbers} | sha256sum`])
      .toString()
      .slice(0, 64),
  );
  // Bytes are missing, so the broker cuts the answer off. A regular end would hide the gap.
  const cut = once(slowBytes, 'error');
  slowBytes.resume();
  expect(await cut).toMatchObject([{ code: 'ECONNRESET' }]);
  let text = '';
  for await (const piece of slowEvents)
    text = text.slice(-100_000) + (text.includes('event: gap') ? 'event: gap' : '') + piece;
  expect(text).toContain('event: gap');
  expect(text).toContain('event: exit');
});

test('a single slow reader gets every byte of more than the window, because the command waits for it', async () => {
  const { system, begin, get } = await bench();
  const { wait, open } = gate();
  const numbers = 'seq 1 14000000';
  const id = await begin(`${wait}; ${numbers}`);
  const slow = await pausedOutput(system, `/commands/${id}/output?follow=true`);
  open();
  const hash = createHash('sha256');
  let seen = 0;
  let next = 0;
  for await (const piece of slow) {
    hash.update(piece);
    seen += piece.length;
    if (seen < next) continue;
    // Pauses until the command waits for this reader: its output then no longer grows. The pause is too short for the
    // broker to cut the reader.
    next += 40 * 2 ** 20;
    let before = -1;
    await soon(async () => {
      const last = before;
      before = (await get(id)).stdout_bytes;
      return before - last;
    }, 300).toBe(0);
  }
  expect(seen).toBeGreaterThan(100 * 2 ** 20);
  expect(hash.digest('hex')).toBe(
    execFileSync('sh', ['-c', `${numbers} | sha256sum`])
      .toString()
      .slice(0, 64),
  );
});

test('a single stalled reader delays the command only for a while, and is cut', async () => {
  const { system, begin, get } = await bench();
  const { wait, open } = gate();
  const id = await begin(`${wait}; head -c 200000000 /dev/zero`);
  const still = await pausedOutput(system, `/commands/${id}/output?follow=true`);
  open();
  // Polls the status, because a stream of events would be another reader. The command completes after the broker has
  // cut the stalled reader, which takes some seconds.
  const status = async () => (await get(id)).status;
  await expect.poll(status, { interval: 200, timeout: 150_000 }).toBe('completed');
  expect(await get(id)).toMatchObject({ status: 'completed', stdout_bytes: 200_000_000 });
  const cut = once(still, 'error');
  still.resume();
  expect(await cut).toMatchObject([{ code: 'ECONNRESET' }]);
}, 180_000);

test('a single reader that disconnects no longer delays the command', async () => {
  // The clock stands still, so a connected reader would delay the command forever.
  leapingClock({ still: true });
  const { system, begin, get } = await bench();
  const { wait, open } = gate();
  const id = await begin(`${wait}; head -c 120000000 /dev/zero`);
  const leaving = await pausedOutput(system, `/commands/${id}/output?follow=true`);
  open();
  await soon(async () => (await get(id)).stdout_bytes).toBeGreaterThan(8_000_000);
  leaving.destroy();
  await soon(async () => (await get(id)).status, 200).toBe('completed');
});

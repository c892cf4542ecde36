// Parses the bytes of an answer as lines and events, in chunks of any size.
import { expect, test } from 'vitest';
import { eventsOf, objectsOf } from '../shared/sdk/parse-lines-and-sse.ts';

const encoder = new TextEncoder();

async function* cut(text: string, size: number): AsyncGenerator<Uint8Array> {
  const bytes = encoder.encode(text);
  for (let at = 0; at < bytes.length; at += size) yield bytes.subarray(at, at + size);
}

test('text after the last line break is an incomplete line, and is not returned', async () => {
  expect(await Array.fromAsync(objectsOf(cut('{"a":1}\n{"a":2}', 4)))).toEqual([{ a: 1 }]);
  expect(await Array.fromAsync(eventsOf(cut('data: 1\n\ndata: 2\n', 4)))).toHaveLength(1);
});

test.each(['\n', '\r\n', '\r'])('lines that end with %j are the same in chunks of any size', async (end) => {
  const text = ['id: 7', 'event: note', ': a comment', 'data: {"text":', 'data: "Grüße"}', '', ''].join(end);
  for (const size of [1, 2, 3, 5, 1000]) {
    expect(await Array.fromAsync(eventsOf(cut(text, size)))).toEqual([
      { id: '7', event: 'note', data: { text: 'Grüße' } },
    ]);
    expect(await Array.fromAsync(objectsOf(cut(`1${end}${end}"zwei"${end}`, size)))).toEqual([1, 'zwei']);
  }
});

test('a long line in many chunks takes time in proportion to its length', { timeout: 8_000 }, async () => {
  const [text] = await Array.fromAsync(objectsOf(cut(`"${'x'.repeat(16_000_000)}"\n`, 512)));
  expect(String(text)).toHaveLength(16_000_000);
});

test('an endless line fails before it fills the memory', async () => {
  const piece = encoder.encode('x'.repeat(8 * 1024 * 1024));
  let given = 0;
  async function* endless(): AsyncGenerator<Uint8Array> {
    for (; given < 100; given += 1) yield piece;
  }
  await expect(Array.fromAsync(objectsOf(endless()))).rejects.toThrow('characters');
  expect(given).toBeLessThan(10);
});

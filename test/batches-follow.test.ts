// The output of all commands of a batch in one stream.
import { expect, onTestFinished, test } from 'vitest';
import { refusalIn } from './all-routes.ts';
import { startFarhand, startWithAgent } from './start-farhand.ts';

test('a stream is refused without the scope, for a batch on other machines, and for an unknown one', async () => {
  const { system, machine_id } = await startWithAgent();
  const { id } = await system.client.batches.create({ machine_ids: [machine_id], command: 'true' });
  const { key: reader } = await system.keyed(['machines:read']);
  const { key: limited } = await system.keyed(['commands:read'], { tags: ['web'] });
  const outcome = async (batch: string, key = system.key, query = '') =>
    refusalIn(await system.call('GET', `/batches/${batch}/stream${query}`, { key }));
  expect(await outcome(id, reader)).toBe('403 forbidden');
  expect(await outcome(id, limited)).toBe('403 forbidden');
  expect(await outcome('batch_x')).toBe('404 batch_not_found');
  expect(await outcome(id, system.key, '?tail=-1')).toBe('400 invalid_request');
});

test('a key follows at most 100 batches at once, and other keys are not affected', async () => {
  const { system, machine_id } = await startWithAgent();
  const { id: batch_id } = await system.client.batches.create({
    ...{ machine_ids: [machine_id], command: 'sleep 600', wait: 0 },
  });
  const { key } = await system.keyed(['commands:read']);
  const path = `${system.url}/api/v1/batches/${batch_id}/stream`;
  // The result includes the response. Otherwise the response could be garbage-collected, and fetch would then close its
  // stream.
  const open = async (as: string): Promise<{ status: number; response: Response; close: () => void }> => {
    const ending = new AbortController();
    onTestFinished(() => ending.abort());
    const response = await fetch(path, {
      headers: { Authorization: `Bearer ${as}` },
      signal: ending.signal,
    });
    return { status: response.status, response, close: () => ending.abort() };
  };
  const streams = await Promise.all(Array.from({ length: 100 }, () => open(key)));
  expect(new Set(streams.map(({ status }) => status))).toEqual(new Set([200]));
  const refused = await system.call('GET', `/batches/${batch_id}/stream`, { key });
  expect(refusalIn(refused)).toBe('503 unavailable');
  expect((await open(system.key)).status).toBe(200);
  streams[0]?.close();
  await expect.poll(async () => (await open(key)).status).toBe(200);
});

test('both outputs and the end of each command arrive as they are written, and the batch at the end', async () => {
  const system = await startFarhand();
  const [one, two] = [await system.agent({ tags: 'web' }), await system.agent()];
  const machine_ids = [one.machineId, two.machineId];
  const command = 'echo out; echo err >&2; exit 3';
  const batch = await system.client.batches.create({ machine_ids, command, wait: 0 });
  const events: { event: string; data: object }[] = [];
  for await (const { event, data } of system.client.batches.stream({ batch_id: batch.id }))
    events.push({ event, data });
  for (const machine_id of machine_ids) {
    const own = events.filter(({ data }) => 'machine_id' in data && data.machine_id === machine_id);
    expect(own).toContainEqual({
      event: 'output',
      data: expect.objectContaining({ stream: 'stdout', data: 'out\n', offset: 0 }),
    });
    expect(own).toContainEqual({
      event: 'output',
      data: expect.objectContaining({ stream: 'stderr', data: 'err\n' }),
    });
    expect(own.at(-1)).toMatchObject({ event: 'exit', data: { status: 'failed', exit_code: 3 } });
  }
  expect(events.at(-1)).toMatchObject({ event: 'end', data: { id: batch.id, status: 'failed', total: 2 } });
  // A limited key follows the machines that it may use.
  const { client } = await system.keyed(['commands:read'], { tags: ['web'] });
  const seen = new Set<unknown>();
  for await (const { data } of client.batches.stream({ batch_id: batch.id }))
    seen.add('machine_id' in data ? data.machine_id : 'end');
  expect(seen).toEqual(new Set([one.machineId, 'end']));
});

test('a stream begins with the last bytes of each output', async () => {
  const { system, machine_id } = await startWithAgent();
  const batch = await system.client.batches.create({
    machine_ids: [machine_id],
    command: 'printf 0123456789',
  });
  const read = async (tail: number) => {
    const pieces: unknown[] = [];
    for await (const { event, data } of system.client.batches.stream({ batch_id: batch.id, tail }))
      if (event === 'output' && 'offset' in data) pieces.push([data.offset, data.data]);
    return pieces;
  };
  expect([await read(4), await read(0), await read(100)]).toEqual([[[6, '6789']], [], [[0, '0123456789']]]);
});

// Event streams over SSE and gRPC: resumed after an event, filtered, and limited to what a key may read.
import { expect, test } from 'vitest';
import { soon } from './commands-fixture.ts';
import { refusalOf, streamsOf } from './grpc-fixture.ts';
import { startFarhand, startWithAgent, type TestSystem, temporaryFolder } from './start-farhand.ts';
import { takeFirst } from './take-first.ts';
import { waitFor } from './wait-for.ts';

interface Seen {
  id: string;
  type: string;
  machine: unknown;
}

interface Params {
  types?: string[];
  machine_id?: string;
  after?: string;
}

type Way = (
  system: TestSystem,
  key: string,
) => Promise<(params: Params, signal?: AbortSignal) => AsyncIterable<Seen> | Promise<AsyncIterable<Seen>>>;

/** Two ways to follow events, which must behave alike. */
const ways: Record<'SSE' | 'gRPC', Way> = {
  async SSE({ client, url }, key) {
    const { Farhand } = await import('../shared/sdk/index.ts');
    const own = key === '' ? client : new Farhand({ baseUrl: url, apiKey: key });
    return async ({ types, machine_id, after }, signal) => {
      const params = {
        ...(types && { types: types.join(',') }),
        ...(machine_id !== undefined && { machine_id }),
        ...(after !== undefined && { last_event_id: after }),
      };
      const events = await own.events.stream(params, signal ? { signal } : {});
      return (async function* () {
        for await (const { data, event, id } of events) {
          expect([event, id]).toEqual([data.type, data.id]);
          yield { id: data.id, type: data.type, machine: data.data.machine_id };
        }
      })();
    };
  },
  async gRPC(system, key) {
    const client = await streamsOf(system, key);
    return async function* ({ types = [], machine_id, after }, signal) {
      const params = {
        types,
        ...(machine_id !== undefined && { machine_id }),
        ...(after !== undefined && { after_id: after }),
      };
      for await (const { id, type, data } of client.events(params, signal ? { signal } : {})) {
        yield { id, type, machine: JSON.parse(data).machine_id };
      }
    };
  },
};

/** Returns the events in the log, oldest first. */
async function logged({ client }: TestSystem, types?: RegExp): Promise<Seen[]> {
  const { items } = await client.events.list({ sort: 'created_at', limit: 100 });
  const seen = items.map(({ id, type, data }) => ({ id, type, machine: data.machine_id }));
  return types ? seen.filter(({ type }) => types.test(type)) : seen;
}

for (const [name, way] of Object.entries(ways)) {
  test(`over ${name} an unknown, deleted or unreadable event to resume after is refused, and so is an unknown type`, async () => {
    const system = await startFarhand();
    const [mine, other] = [await system.agent(), await system.agent()];
    const follow = await way(system, system.key);
    for (const after of ['evt_nowhere', '0', 'x']) {
      const refused = await refusalOf(takeFirst(1, follow({ after })));
      expect(refused).toMatchObject({ code: 'range_not_satisfiable', details: { last_event_id: after } });
    }
    for (const types of [['machine.nothing'], ['nothing.*'], ['machine.online', '']]) {
      expect(await refusalOf(takeFirst(1, follow({ types })))).toMatchObject({ code: 'invalid_request' });
    }
    const { key } = await system.keyed(['machines:read'], { machine_ids: [mine.machineId] });
    const limited = await way(system, key);
    const foreign = (await logged(system)).find(({ machine }) => machine === other.machineId);
    expect(await refusalOf(takeFirst(1, limited({ after: foreign?.id ?? '' })))).toMatchObject({
      code: 'range_not_satisfiable',
    });
  });

  test(`over ${name} a stream resumed after an event has each later event once, in order, and then new ones`, async () => {
    const { system, machine_id } = await startWithAgent();
    for (let n = 0; n < 10; n += 1) await system.client.commands.create({ machine_id, command: 'true' });
    // Reads only the events of commands. The event machine.online is recorded two seconds after the link, so its place
    // among them varies.
    const before = await logged(system, /^command\./);
    const follow = await way(system, system.key);
    const events = await follow({ after: before[4]?.id ?? '', types: ['command.*'] });
    const rest = takeFirst(before.length - 5 + 2, events);
    await system.client.commands.create({ machine_id, command: 'true' });
    const seen = await rest;
    expect(seen).toEqual((await logged(system, /^command\./)).slice(5));
    expect(seen.slice(-2).map(({ type }) => type)).toEqual(['command.started', 'command.completed']);
  });

  test(`over ${name} filters by type and machine leave out other events, and a key gets only events of its machines`, async () => {
    const system = await startFarhand();
    const [mine, other] = [await system.agent(), await system.agent()];
    const [first] = await logged(system);
    for (const { machineId: machine_id } of [other, mine]) {
      await system.client.commands.create({ machine_id, command: 'true' });
    }
    const after = first?.id ?? '';
    const follow = await way(system, system.key);
    const commands = await logged(system, /^command\./);
    expect(await takeFirst(4, follow({ after, types: ['command.*'] }))).toEqual(commands);
    expect(await takeFirst(2, follow({ after, types: ['command.completed', 'file.deleted'] }))).toEqual(
      commands.filter(({ type }) => type === 'command.completed'),
    );
    const ofMine = commands.filter(({ machine }) => machine === mine.machineId);
    expect(await takeFirst(2, follow({ after, types: ['command.*'], machine_id: mine.machineId }))).toEqual(
      ofMine,
    );
    const { key } = await system.keyed(['machines:read', 'commands:read'], { machine_ids: [mine.machineId] });
    const limited = await way(system, key);
    const own = (await logged(system)).filter(({ machine }) => machine === mine.machineId);
    expect(await takeFirst(own.length - 1, limited({ after: own[0]?.id ?? '' }))).toEqual(own.slice(1));
  });

  test(`over ${name} a key gets only event families of its scopes, and cannot resume after others`, async () => {
    const { system, machine_id } = await startWithAgent();
    const path = `${temporaryFolder('events')}/x`;
    await system.client.commands.create({ machine_id, command: 'true' });
    await system.client.files.write({ machine_id, path, content: '' });
    await system.agent();
    const all = await logged(system);
    const { key } = await system.keyed(['machines:read', 'files:read']);
    const follow = await way(system, key);
    const command = all.findIndex(({ type }) => type === 'command.started');
    const expected = all.slice(command).filter(({ type }) => /^(machine|file)\./.test(type));
    expect(expected.map(({ type }) => type)).toContain('file.uploaded');
    const after = all.slice(0, command).findLast(({ type }) => type.startsWith('machine.'))?.id ?? '';
    expect(await takeFirst(expected.length, follow({ after }))).toEqual(expected);
    const unreadable = refusalOf(takeFirst(1, follow({ after: all[command]?.id ?? '' })));
    expect(await unreadable).toMatchObject({ code: 'range_not_satisfiable' });
  });

  test(`over ${name} a stream that is not resumed has only new events`, async () => {
    const { system, machine_id } = await startWithAgent();
    const path = `${temporaryFolder('events')}/x`;
    await system.client.files.write({ machine_id, path, content: '' });
    const follow = await way(system, system.key);
    const heard: Seen[] = [];
    const stop = new AbortController();
    const listening = (async () => {
      for await (const event of await follow({ types: ['file.*'] }, stop.signal)) heard.push(event);
    })().catch(() => undefined);
    // Changes a file until the stream reports a change, because the stream may begin only after the first changes.
    await soon(async () => {
      await system.client.files.write({ machine_id, path, content: '' });
      return heard.length;
    }).toBeGreaterThan(0);
    stop.abort();
    await listening;
    const files = await logged(system, /^file\./);
    const from = files.findIndex(({ id }) => id === heard[0]?.id);
    expect(from).toBeGreaterThan(0);
    expect(heard).toEqual(files.slice(from, from + heard.length));
  });
}

test('the header of a stream names an event that its key may read', async () => {
  const { system, machine_id } = await startWithAgent();
  await system.client.commands.create({ machine_id, command: 'true' });
  const { key } = await system.keyed(['machines:read']);
  const stop = new AbortController();
  const headers = { Authorization: `Bearer ${key}` };
  const answer = await fetch(`${system.url}/api/v1/events/stream`, { headers, signal: stop.signal });
  stop.abort();
  const named = answer.headers.get('x-last-event-id');
  expect((await logged(system)).find(({ id }) => id === named)?.type).toMatch(/^machine\./);
});

test('the list of events has only event families of the key’s scopes, on full pages', async () => {
  const { system, machine_id } = await startWithAgent();
  for (let n = 0; n < 3; n += 1) await system.client.commands.create({ machine_id, command: 'true' });
  for (let n = 0; n < 2; n += 1) await system.agent();
  const { client } = await system.keyed(['machines:read']);
  // Tries again, because a machine may go online between the two requests.
  await waitFor(async () => {
    const expected = await logged(system, /^machine\./);
    const page = await client.events.list({ sort: 'created_at', limit: 1, offset: 1 });
    expect([page.total, page.items.map(({ id }) => id)]).toEqual([expected.length, [expected[1]?.id]]);
  });
  expect((await client.events.list({ type: 'command.started' })).total).toBe(0);
});

test('after a restart of the broker a stream resumes without loss', async () => {
  const dataDir = temporaryFolder('broker');
  const first = await startFarhand({ dataDir });
  const { machineId: machine_id } = await first.agent();
  await first.client.commands.create({ machine_id, command: 'true' });
  const [last] = await logged(first);
  await first.broker.close();
  const system = await startFarhand({ dataDir });
  const follow = await ways.gRPC(system, system.key);
  const expected = (await logged(system)).slice(1);
  expect(await takeFirst(expected.length, follow({ after: last?.id ?? '' }))).toEqual(expected);
});

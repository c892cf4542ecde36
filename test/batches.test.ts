// Batches: one command on many machines, with limits on simultaneous commands and on failures.
import { existsSync, mkdirSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { request } from 'undici';
import { expect, test } from 'vitest';
import type { Tuning } from '../broker/start/index.ts';
import type { MachineId } from '../shared/api/shared-schemas.ts';
import { Farhand } from '../shared/sdk/index.ts';
import {
  commandsOn,
  type Gate,
  gate,
  leapingClock,
  listen,
  nextCall,
  reporting,
  soon,
} from './commands-fixture.ts';
import { storedRows } from './read-stored-state.ts';
import { joinScripted, scriptedMachine } from './scripted-agent.ts';
import { type AgentHandle, startFarhand, type TestSystem, temporaryFolder } from './start-farhand.ts';
import { startProxy } from './tcp-proxy.ts';
import { waitFor } from './wait-for.ts';

const hour = 3_600_000;

/** A system with this number of machines, named m0, m1, … */
async function fleet(count: number, tagsOf: (n: number) => string = () => '') {
  const system = await startFarhand();
  const agents: AgentHandle[] = [];
  for (let n = 0; n < count; n += 1) agents.push(await system.agent({ name: `m${n}`, tags: tagsOf(n) }));
  const ids = agents.map(({ machineId }) => machineId);
  return { system, agents, ids, ...batchesOf(system) };
}

function batchesOf(system: Pick<TestSystem, 'client'>) {
  const { client } = system;
  return {
    run: (command: string, more: object) => client.batches.create({ command, wait: 50_000, ...more }),
    get: (batch_id: string) => client.batches.get({ batch_id }),
    /** Resolves with the batch after every command in it has ended. */
    async ended(batch_id: string) {
      const { results } = await client.batches.get({ batch_id });
      await Promise.all(results.map(({ id }) => listen(system, id)));
      return client.batches.get({ batch_id });
    },
  };
}

/**
 * Returns a shell command that waits at a gate, and counters: `now` counts the running commands, and `ran` all that
 * have started.
 */
function marked(wait: Gate['wait']) {
  const folder = temporaryFolder('marks');
  mkdirSync(join(folder, 'now'));
  return {
    command: `touch ${folder}/now/$$; echo $$ >> ${folder}/ran; echo in; ${wait}; rm ${folder}/now/$$`,
    now: () => readdirSync(join(folder, 'now')).length,
    ran: () => readFileSync(join(folder, 'ran'), 'utf8').trim().split('\n').length,
  };
}

const refused: [what: string, params: object][] = [
  ['neither machine_ids nor tags', {}],
  ['both machine_ids and tags', { machine_ids: 'all', tags: ['a'] }],
  ['no machine', { machine_ids: [] }],
  ['tags that no machine has', { tags: ['nowhere'] }],
  ['tags of which a machine has only one', { tags: ['a', 'nowhere'] }],
  ['an empty list of tags, which every machine has', { tags: [] }],
  ['no command', { machine_ids: 'all', command: '' }],
  ['a concurrency of 0', { machine_ids: 'all', concurrency: 0 }],
  ['a negative max_failures', { machine_ids: 'all', max_failures: -1 }],
  ['a wait over 50 s', { machine_ids: 'all', wait: 50_001 }],
  ['an unknown field', { machine_ids: 'all', input: true }],
  ['a command longer than a single one may be', { machine_ids: 'all', command: 'x'.repeat(131_073) }],
  ['more than 64 KiB of input', { machine_ids: 'all', stdin: 'x'.repeat(65_536) }],
  [
    'more than 64 KiB of args, env and input together',
    { machine_ids: 'all', args: ['x'.repeat(40_000)], env: { X: 'y'.repeat(30_000) } },
  ],
];

test('a batch that breaks the schema, or has no machine, is refused with 422, and nothing is stored', async () => {
  const { system, ids } = await fleet(1, () => 'a');
  for (const [what, params] of refused) {
    const all = 'machine_ids' in params && params.machine_ids === 'all' && { machine_ids: ids };
    const body = { command: 'true', ...params, ...all };
    const answer = await system.call('POST', '/commands/batch', { body });
    expect([what, answer.status, answer.body.error.code]).toEqual([what, 422, 'validation_failed']);
    expect(answer.body.error.details.issues.length).toBeGreaterThan(0);
  }
  expect((await system.client.batches.list()).total).toBe(0);
  expect((await system.client.commands.list()).total).toBe(0);
});

test('an unknown machine is 404, a machine beyond the key’s limit 403, and no machine runs anything', async () => {
  const { system, ids } = await fleet(2);
  const limited = await system.keyed(['commands:execute', 'commands:read'], { machine_ids: [ids[0]!] });
  for (const [key, machine_ids, status, code] of [
    [system.key, [ids[0], 'mach_none'], 404, 'machine_not_found'],
    [limited.key, ids, 403, 'forbidden'],
    [limited.key, ['mach_none'], 403, 'forbidden'],
  ] as const) {
    const body = { machine_ids, command: 'true' };
    const answer = await system.call('POST', '/commands/batch', { key, body });
    expect([answer.status, answer.body.error.code]).toEqual([status, code]);
  }
  expect((await system.client.commands.list()).total).toBe(0);
});

test('an id that names no batch is batch_not_found, and a key without the scope is forbidden', async () => {
  const { system, ids, run } = await fleet(1);
  for (const method of ['GET', 'DELETE']) {
    const { status, body } = await system.call(method, '/batches/batch_none');
    expect([status, body.error.code]).toEqual([404, 'batch_not_found']);
  }
  const { id } = await run('true', { machine_ids: ids });
  const reader = await system.keyed(['commands:read']);
  expect((await system.call('DELETE', `/batches/${id}`, { key: reader.key })).status).toBe(403);
  const body = { machine_ids: ids, command: 'true' };
  expect((await system.call('POST', '/commands/batch', { key: reader.key, body })).status).toBe(403);
});

test('a batch runs on each machine once, reports the result of each, and its members can be listed', async () => {
  const { system, ids, run } = await fleet(3);
  const batch = await run('echo "$WORD"; cat; [ ! -e $FILE ]', {
    ...{
      machine_ids: [...ids, ids[0], ids[1]],
      env: { WORD: 'w', FILE: '/nowhere' },
      stdin: 'in',
      cwd: '/tmp',
    },
  });
  expect(batch).toEqual({
    id: expect.stringMatching(/^batch_/),
    ...{
      status: 'completed',
      command: 'echo "$WORD"; cat; [ ! -e $FILE ]',
      args: null,
      cwd: '/tmp',
      user: null,
    },
    ...{ concurrency: null, max_failures: null, total: 3 },
    counts: { queued: 0, running: 0, completed: 3, failed: 0, timeout: 0, cancelled: 0, expired: 0, lost: 0 },
    ...{
      created_at: expect.any(String),
      finished_at: expect.any(String),
      requested_by: expect.stringMatching(/^key_/),
    },
    results: expect.any(Array),
  });
  expect(batch.results.map(({ machine_id }) => machine_id)).toEqual(ids);
  for (const result of batch.results)
    expect(result).toMatchObject({ batch_id: batch.id, status: 'completed', stdout: 'w\nin', exit_code: 0 });
  const members = await system.client.commands.list({ batch_id: batch.id });
  expect(members.total).toBe(3);
  await system.client.commands.create({ machine_id: ids[0]!, command: 'true' });
  expect((await system.client.commands.list({ batch_id: batch.id })).total).toBe(3);
  const { results: _, ...listed } = batch;
  expect((await system.client.batches.list()).items).toEqual([listed]);
  expect((await system.call('GET', '/commands?batch_id=batch_none')).body.error.code).toBe('batch_not_found');
});

test('by tags it runs only on machines with all of them that the key may use', async () => {
  const { system, ids, run } = await fleet(4, (n) => ['web,prod', 'web', 'web,prod', 'prod'][n]!);
  const machinesOf = (batch: { results: { machine_id: string }[] }) =>
    new Set(batch.results.map(({ machine_id }) => machine_id));
  expect(machinesOf(await run('true', { tags: ['prod', 'web'] }))).toEqual(new Set([ids[0], ids[2]]));
  const limited = await system.keyed(['commands:execute', 'commands:read'], {
    machine_ids: [ids[2]!, ids[3]!],
  });
  const theirs = await limited.client.batches.create({ command: 'true', tags: ['web'] });
  expect(machinesOf(theirs)).toEqual(new Set([ids[2]]));
  // Commands of the batch on machines beyond the key's limit are not listed.
  expect((await system.client.commands.list({ batch_id: theirs.id })).total).toBe(1);
  await expect(limited.client.batches.create({ command: 'true', tags: ['other'] })).rejects.toMatchObject({
    status: 422,
  });
});

test('a batch that did not complete everywhere is failed, and counts say why', async () => {
  const { ids, run } = await fleet(3);
  const one = join(temporaryFolder('one'), 'one');
  const batch = await run(`mkdir ${one} || exit 3`, { machine_ids: ids });
  expect(batch).toMatchObject({ status: 'failed', counts: { failed: 2, completed: 1 } });
  const slow = await run('sleep 600', { machine_ids: ids.slice(0, 1), timeout: 100 });
  expect(slow).toMatchObject({ status: 'failed', counts: { timeout: 1 }, results: [{ status: 'timeout' }] });
});

test('at most `concurrency` members run at once, and all of them run in the end', async () => {
  const { system, ids, run, get, ended } = await fleet(7);
  const { wait, open } = gate();
  const marks = marked(wait);
  const { id, results, status } = await run(marks.command, { machine_ids: ids, concurrency: 3, wait: 0 });
  expect(status).toBe('running');
  let done = 0;
  while (done < 7) {
    // Waits until the commands with a slot have started. A command beyond the limit would have started too, and be
    // counted.
    const running = Math.min(3, 7 - done);
    await soon(() => marks.ran()).toBe(done + running);
    await soon(async () => (await get(id)).counts.running).toBe(running);
    expect(marks.now()).toBe(running);
    expect((await get(id)).counts).toMatchObject({ completed: done, queued: 7 - done - running });
    open();
    done += 1;
    await soon(async () => (await get(id)).counts.completed).toBe(done);
  }
  expect(await ended(id)).toMatchObject({ status: 'completed', counts: { completed: 7 } });
  expect(marks.ran()).toBe(7);
  expect(results.map(({ machine_id }) => machine_id)).toEqual(ids);
  expect((await system.client.commands.list({ status: 'queued' })).total).toBe(0);
});

test('when more than max_failures have failed, the other members expire and never run', async () => {
  const { ids, run } = await fleet(5);
  const folder = temporaryFolder('failures');
  const failing = `echo ran >> ${folder}/ran; exit 1`;
  const none = await run(failing, { machine_ids: ids, concurrency: 1, max_failures: 0 });
  expect(none).toMatchObject({ status: 'failed', counts: { failed: 1, expired: 4 }, max_failures: 0 });
  expect(none.results.slice(1).map(({ reason }) => reason)).toEqual(Array(4).fill('max_failures'));
  expect(readFileSync(join(folder, 'ran'), 'utf8')).toBe('ran\n');
  const one = await run(failing, { machine_ids: ids, concurrency: 1, max_failures: 1 });
  expect(one.counts).toMatchObject({ failed: 2, expired: 3 });
  // Running commands are not ended by the failures of others.
  const all = await run(failing, { machine_ids: ids, max_failures: 0 });
  expect(all.counts).toMatchObject({ failed: 5, expired: 0 });
});

test('without queue_for offline members expire at once, and delay no other member', async () => {
  const { ids, agents, run } = await fleet(4);
  await agents[0]!.close();
  await agents[2]!.close();
  const batch = await run('echo here', { machine_ids: ids, concurrency: 1 });
  expect(batch).toMatchObject({ status: 'failed', counts: { completed: 2, expired: 2 } });
  expect(batch.results.map(({ status, reason }) => [status, reason])).toEqual([
    ['expired', 'machine_offline'],
    ['completed', null],
    ['expired', 'machine_offline'],
    ['completed', null],
  ]);
});

test('offline members count as failures: with max_failures 0 no later member runs', async () => {
  const { ids, agents, run } = await fleet(2);
  await agents[0]!.close();
  const batch = await run('true', { machine_ids: ids, concurrency: 1, max_failures: 0 });
  expect(batch.results.map(({ reason }) => reason)).toEqual(['machine_offline', 'max_failures']);
});

test('with queue_for offline members delay no other member, and run when their machine is back', async () => {
  const { system, ids, agents, run, get, ended } = await fleet(3);
  await agents[0]!.close();
  const { id } = await run('echo here', { machine_ids: ids, concurrency: 1, queue_for: hour, wait: 0 });
  await soon(async () => (await get(id)).counts).toMatchObject({ completed: 2, queued: 1 });
  const { results, status, finished_at } = await get(id);
  expect([results[0]?.status, status, finished_at]).toEqual(['queued', 'running', null]);
  await system.agent({ dataDir: agents[0]!.dataDir });
  expect(await ended(id)).toMatchObject({ status: 'completed', counts: { completed: 3 } });
});

test('waiting members expire at their time, and the batch ends with them', async () => {
  const clock = leapingClock();
  const { ids, agents, run, ended } = await fleet(2);
  await agents[0]!.close();
  const { id } = await run('true', { machine_ids: ids, queue_for: 20_000, wait: 0 });
  clock.leap(20_001);
  const batch = await ended(id);
  expect([batch.status, batch.results[0]?.reason]).toEqual(['failed', 'queue_expired']);
});

test('DELETE cancels running and waiting members, and answers when all of them have ended', async () => {
  const { system, ids, run, get } = await fleet(4);
  const { wait } = gate();
  const marks = marked(wait);
  const { id, results } = await run(marks.command, { machine_ids: ids, concurrency: 2, wait: 0 });
  await Promise.all(
    results.slice(0, 2).map((one) => listen(system, one.id, undefined, ({ stdout }) => stdout.length > 0)),
  );
  const cancelled = await system.client.batches.cancel({ batch_id: id });
  expect(cancelled).toMatchObject({ status: 'cancelled', counts: { cancelled: 4 } });
  expect(cancelled.results.map(({ started_at }) => started_at === null)).toEqual([false, false, true, true]);
  expect(await system.client.batches.cancel({ batch_id: id })).toEqual(cancelled);
  expect(await get(id)).toEqual(cancelled);
  expect(marks.ran()).toBe(2);
});

test('cancelling a batch that has ended changes nothing, however it ended', async () => {
  const { system, ids, run } = await fleet(1);
  for (const [command, status] of [
    ['true', 'completed'],
    ['false', 'failed'],
  ] as const) {
    const batch = await run(command, { machine_ids: ids });
    expect(batch.status).toBe(status);
    expect(await system.client.batches.cancel({ batch_id: batch.id })).toEqual(batch);
  }
});

test('the command of a batch is stored once, and its secrets only while it is open', async () => {
  const { system, ids, run } = await fleet(2);
  const { wait, open } = gate();
  const secret = { env: { TOKEN: 'hidden-9f2' }, stdin: 'hidden-7c1' };
  const batch = await run(`${wait}; echo $TOKEN; cat`, {
    machine_ids: ids,
    wait: 0,
    concurrency: 1,
    ...secret,
  });
  const kept = async (): Promise<number> => {
    const count = async (table: string): Promise<number> => {
      const sql = `SELECT count(*) AS n FROM ${table} WHERE spec LIKE '%hidden-9f2%'`;
      return Number((await storedRows(system.dataDir, sql))[0]?.n);
    };
    return (await count('commands')) * 10 + (await count('batches'));
  };
  expect(await kept()).toBe(1);
  open();
  open();
  const ended = await Promise.all(batch.results.map(({ id }) => listen(system, id)));
  expect(ended.map(({ stdout }) => stdout.toString())).toEqual(Array(2).fill('hidden-9f2\nhidden-7c1'));
  await soon(kept).toBe(0);
});

test('a command of the greatest length runs on a list of ten thousand machines, and is stored once', async () => {
  const { system, ids, agents, run } = await fleet(2);
  const machine_ids = Array.from({ length: 10_000 }, (_, n) => ids[n % 2]!);
  const text = `echo ran; : ${'x'.repeat(131_000)}`;
  const tooMany = { machine_ids: [...machine_ids, ids[0]], command: 'true' };
  expect((await system.call('POST', '/commands/batch', { body: tooMany })).status).toBe(422);
  const batch = await run(text, { machine_ids });
  expect(batch).toMatchObject({ status: 'completed', total: 2, command: text });
  expect(batch.results.map(({ stdout }) => stdout)).toEqual(['ran\n', 'ran\n']);
  await agents[1]!.close();
  const args = ['-c', 'echo "$0"', 'y'.repeat(60_000)];
  const waiting = await run('sh', { args, machine_ids: [ids[1]], queue_for: hour, wait: 0 });

  const commandsOf = async ({ client }: TestSystem) =>
    (await client.commands.list({ sort: 'created_at' })).items.map((one) => [one.command, one.args]);
  const expected = [...[text, text].map((one) => [one, null]), ['sh', args]];
  expect(await commandsOf(system)).toEqual(expected);
  const { items } = await system.client.events.list({ type: 'command.completed' });
  expect(items.map(({ data }) => data.command)).toEqual(Array(2).fill(text.slice(0, 4096)));
  await system.broker.close();
  const stored = await storedRows(system.dataDir, 'SELECT command, args FROM commands');
  expect(stored).toEqual(Array(3).fill({ command: '', args: null }));
  const again = await startFarhand({ dataDir: system.dataDir });
  expect(await commandsOf(again)).toEqual(expected);
  await again.agent({ dataDir: agents[1]!.dataDir });
  const [last] = await batchesOf(again)
    .ended(waiting.id)
    .then(({ results }) => results);
  expect(last).toMatchObject({ status: 'completed', stdout_bytes: 60_001 });
  expect(await again.client.commands.get({ command_id: last!.id })).toMatchObject({ command: 'sh', args });
});

/** A system with this number of machines that have never been linked. */
async function largeFleet(count: number) {
  const stores: Parameters<NonNullable<Tuning['onStores']>>[0][] = [];
  const system = await startFarhand({ tuning: { onStores: (opened) => void stores.push(opened) } });
  const { identity } = await scriptedMachine(system);
  const { state, history } = stores[0]!;
  const first = state.machines.get(identity.machineId)!;
  const ids = Array.from({ length: count }, (_, n) => `mach_${String(n).padStart(22, '0')}` as MachineId);
  await state.change((draft) => {
    for (const id of ids) draft.put('machines', { ...first, id, name: id, public_key: id });
  });
  return { system, history, ids };
}

test('a batch that is cancelled while it is being stored runs on none of its later machines', async () => {
  const { system, ids } = await largeFleet(2_000);
  const agent = await system.agent();
  const file = join(temporaryFolder('ran'), 'ran');
  const machine_ids = [...ids, agent.machineId];
  const making = system.client.batches.create({
    machine_ids,
    command: `touch ${file}`,
    queue_for: hour,
    wait: 0,
  });
  // The first part of a batch is stored and listed at once.
  const batch_id = await waitFor(async () => {
    const { items } = await system.client.batches.list();
    expect(items).toHaveLength(1);
    return items[0]!.id;
  });
  await system.client.batches.cancel({ batch_id });
  await making;
  await soon(async () => (await system.client.batches.get({ batch_id })).finished_at).not.toBe(null);
  expect(await system.client.batches.get({ batch_id })).toMatchObject({
    status: 'cancelled',
    counts: { cancelled: 2_001 },
  });
  expect(existsSync(file)).toBe(false);
});

test('a batch of many machines lists all of them at once, and DELETE ends all', async () => {
  const { system, ids } = await largeFleet(1_100);
  const many = { machine_ids: ids, command: 'true', queue_for: hour, wait: 0 };
  const made = await system.client.batches.create(many);
  expect(made).toMatchObject({ status: 'running', total: 1_100, counts: { queued: 1_100 } });
  expect(made.results.map(({ machine_id }) => machine_id)).toEqual(ids);
  const last = { command_id: made.results.at(-1)!.id };
  expect(await system.client.commands.get(last)).toMatchObject({ status: 'queued', batch_id: made.id });
  expect((await system.client.commands.cancel(last)).status).toBe('cancelled');
  expect((await system.client.batches.list()).items).toMatchObject([{ id: made.id, total: 1_100 }]);
  const cancelled = await system.client.batches.cancel({ batch_id: made.id });
  expect(cancelled).toMatchObject({ status: 'cancelled', counts: { cancelled: 1_100 } });
  expect(cancelled.results.map(({ id }) => id)).toEqual(made.results.map(({ id }) => id));
  const rows = (await system.call('GET', '/audit?action=batches.create&limit=1')).body.meta.total;
  expect(rows).toBe(1_100);
});

test('a batch of many machines is answered in many turns, so that other requests need not wait', async () => {
  const { system, ids } = await largeFleet(3_000);
  const many = { machine_ids: ids, command: 'true', queue_for: hour, wait: 0 };
  const { id } = await system.client.batches.create(many);
  const headers = { authorization: `Bearer ${system.key}` };
  const shares: number[] = [];
  // Another program or a garbage collection can make a single turn longer. So only the best of five requests counts.
  for (let round = 0; round < 5; round += 1) {
    const begun = performance.now();
    let [last, longest, hasEnded] = [begun, 0, false];
    const turn = (): void => {
      longest = Math.max(longest, performance.now() - last);
      last = performance.now();
      if (!hasEnded) setImmediate(turn);
    };
    const answered = request(`${system.url}/api/v1/batches/${id}`, { headers });
    turn();
    const { statusCode, body } = await answered;
    await body.dump();
    hasEnded = true;
    expect(statusCode).toBe(200);
    shares.push(longest / (performance.now() - begun));
  }
  // If one turn of the event loop read or serialized all commands, it would take about half of the request's time.
  expect(Math.min(...shares)).toBeLessThan(1 / 4);
});

test('a limited key follows its own machines in a batch of over 1,000, and does not learn the total', async () => {
  const { system, ids } = await largeFleet(1_000);
  const { machineId } = await system.agent({ tags: 'web' });
  const many = { machine_ids: [...ids, machineId], command: 'echo mine', queue_for: hour, wait: 0 };
  const { id: batch_id } = await system.client.batches.create(many);
  const refused = await system.call('GET', `/batches/${batch_id}/stream`);
  expect([refused.status, refused.body.error.code]).toEqual([409, 'conflict']);
  const { client } = await system.keyed(['commands:read'], { tags: ['web'] });
  const seen: unknown[] = [];
  for await (const { event, data } of client.batches.stream({ batch_id }))
    if (event === 'output' && 'data' in data) seen.push([data.machine_id, data.data]);
  expect(seen).toEqual([[machineId, 'mine\n']]);
});

test('a batch that was stored only in part before a crash is removed at the next start, and no other batch', async () => {
  const { system, ids } = await largeFleet(300);
  const many = { machine_ids: ids, command: 'true', queue_for: hour, wait: 0 };
  const [whole, part, begun] = [
    await system.client.batches.create(many),
    await system.client.batches.create(many),
    await system.client.batches.create(many),
  ];
  await system.broker.close();
  // The broker stores a large batch in parts, and the spec with the last part. It deletes the spec after the batch has
  // ended. So a batch without a spec is incomplete if it has not ended.
  const database = new DatabaseSync(join(system.dataDir, 'history.db'));
  database.prepare('UPDATE batches SET spec = NULL WHERE id IN (?, ?)').run(part.id, begun.id);
  const [first] = begun.results;
  database.prepare("UPDATE commands SET journal_id = 'journal' WHERE id = ?").run(first?.id ?? '');
  database.close();
  const again = await startFarhand({ dataDir: system.dataDir });
  const { items } = await again.client.batches.list({ sort: 'created_at' });
  expect(items.map(({ id, total }) => [id, total])).toEqual([
    [whole.id, 300],
    [begun.id, 300],
  ]);
  expect((await again.client.commands.list()).total).toBe(600);
});

test.each([
  ['first', 0, ['ok']],
  ['second', 100, ['ok', 'internal_error', 'ok']],
])(
  'a batch whose %s part cannot be stored is refused whole and recorded as failed, and the next one is stored',
  async (_name, most, ofFirst) => {
    const { system, history, ids } = await largeFleet(600);
    const write = history.write.bind(history);
    let fails = true;
    history.write = (change) =>
      write(async (transaction) => {
        const result = await change(transaction);
        const stored = await transaction.get('SELECT count(*) AS n FROM commands');
        if (fails && Number(stored?.n) > most) throw new Error('no space left');
        return result;
      });
    const many = { machine_ids: ids, command: 'true', queue_for: hour, wait: 0 };
    const totals = async ({ client }: TestSystem) => [
      (await client.batches.list()).total,
      (await client.commands.list()).total,
    ];
    for (const [status, stored] of [
      [500, [0, 0]],
      [201, [1, 600]],
    ] as const) {
      const answer = await system.call('POST', '/commands/batch', { body: many });
      expect([answer.status, await totals(system)]).toEqual([status, stored]);
      fails = false;
    }
    const recorded = async (machine_id: MachineId | undefined) => {
      const rows = await history.all(
        `SELECT result FROM audit WHERE action = 'batches.create' AND coalesce(machine_id, '') = ? ORDER BY seq`,
        machine_id ?? '',
      );
      return rows.map(({ result }) => result);
    };
    expect(await recorded(ids[0])).toEqual(ofFirst);
    expect(await recorded(ids.at(-1))).toEqual(['ok']);
    expect(await recorded(undefined)).toEqual(['internal_error']);
    await system.broker.close();
    const again = await startFarhand({ dataDir: system.dataDir });
    expect(await totals(again)).toEqual([1, 600]);
    expect((await again.client.batches.list()).items).toMatchObject([{ counts: { queued: 600 } }]);
  },
);

test('a limited key sees only the results of its machines, and cannot cancel a batch with other machines', async () => {
  const { system, ids, run } = await fleet(3);
  const { wait, open } = gate();
  const batch = await run(`${wait}; exit 0`, { machine_ids: ids.slice(0, 2), wait: 0 });
  const mine = await system.keyed(['commands:execute', 'commands:read'], { machine_ids: [ids[0]!] });
  const none = await system.keyed(['commands:execute', 'commands:read'], { machine_ids: [ids[2]!] });
  const seen = await mine.client.batches.get({ batch_id: batch.id });
  expect([seen.total, seen.results.map(({ machine_id }) => machine_id)]).toEqual([1, [ids[0]]]);
  expect((await mine.client.batches.list()).items).toMatchObject([{ id: batch.id, total: 1 }]);
  expect((await none.client.batches.list()).total).toBe(0);
  for (const [method, { key }] of [
    ['DELETE', mine],
    ['DELETE', none],
    ['GET', none],
  ] as const) {
    const { status, body } = await system.call(method, `/batches/${batch.id}`, { key });
    expect([method, status, body.error.code]).toEqual([method, 403, 'forbidden']);
  }
  const theirs = await system.call('GET', `/commands?batch_id=${batch.id}`, { key: mine.key });
  expect(theirs.body.meta.total).toBe(1);
  open();
  open();
  const ended = await Promise.all(batch.results.map(({ id }) => listen(system, id)));
  expect(ended.map(({ events }) => events.at(-1)?.data)).toMatchObject([
    { status: 'completed' },
    { status: 'completed' },
  ]);
});

test('after a restart of the broker a batch goes on within its concurrency, and runs nothing twice', async () => {
  const system = await startFarhand();
  const proxy = await startProxy(system.grpc);
  const agents = [];
  for (let n = 0; n < 4; n += 1) agents.push(await system.agent({ through: proxy.address }));
  const { wait, open } = gate();
  const marks = marked(wait);
  const machine_ids = agents.map(({ machineId }) => machineId);
  const { id, results } = await batchesOf(system).run(marks.command, {
    machine_ids,
    concurrency: 2,
    wait: 0,
  });
  await Promise.all(
    results.slice(0, 2).map((one) => listen(system, one.id, undefined, ({ stdout }) => stdout.length > 0)),
  );
  proxy.forbid();
  await system.broker.close();
  const again = await startFarhand({ dataDir: system.dataDir, flags: ['--grpc', system.grpc] });
  // With several brokers, a request can get 503 while a machine changes its owner. Clients retry such a request.
  const client = new Farhand({ baseUrl: again.url, apiKey: again.key });
  const { get, ended } = batchesOf({ client });
  const back = agents.map(({ linked }) => linked(true));
  proxy.allow();
  await Promise.all(back);
  for (let done = 0; done < 4; done += 1) {
    const running = Math.min(2, 4 - done);
    await soon(() => marks.ran()).toBe(done + running);
    await soon(async () => (await get(id)).counts).toMatchObject({ completed: done, running });
    expect(marks.now()).toBe(running);
    open();
    await soon(async () => (await get(id)).counts.completed).toBe(done + 1);
  }
  expect(await ended(id)).toMatchObject({ status: 'completed', concurrency: 2 });
  expect(marks.ran()).toBe(4);
});

test('members whose machines are not back a minute after a restart are expired, and not before', async () => {
  const clock = leapingClock();
  const { system, ids, agents, run } = await fleet(2);
  const { wait } = gate();
  const { id, results } = await run(wait, { machine_ids: ids, concurrency: 1, wait: 0 });
  await soon(async () => (await system.client.commands.get({ command_id: results[0]!.id })).status).toBe(
    'running',
  );
  for (const agent of agents) await agent.close();
  await system.broker.close();
  const again = await startFarhand({ dataDir: system.dataDir });
  await again.agent({ dataDir: agents[0]!.dataDir });
  await soon(async () => (await again.client.batches.get({ batch_id: id })).counts).toMatchObject({
    lost: 1,
    queued: 1,
  });
  clock.leap(60_001);
  await soon(async () => (await again.client.batches.get({ batch_id: id })).results[1]).toMatchObject({
    ...{ status: 'expired', reason: 'machine_offline' },
  });
});

test('a machine that repeatedly reports a false start gets no second slot for its member', async () => {
  const system = await startFarhand();
  const liar = await scriptedMachine(system);
  const honest = [await scriptedMachine(system), await scriptedMachine(system)];
  const machine_ids = [liar, ...honest].map(({ identity }) => identity.machineId);
  await system.client.batches.create({
    command: 'true',
    machine_ids,
    concurrency: 1,
    queue_for: hour,
    wait: 0,
  });
  const report = reporting(liar, (await nextCall(liar, 'StartProcess')).call_id);
  for (let n = 0; n < 3; n += 1) report.unknown();
  report.end();
  // The broker sends the start to the same machine again. Until that start is answered, no other command of the batch
  // starts.
  const again = await nextCall(liar, 'StartProcess');
  const first = honest.map((agent) => agent.next('call'));
  const early = Promise.race(first.map((call) => call.then(() => 'early')));
  await system.client.machines.list();
  expect(await Promise.race([early, system.client.machines.list().then(() => 'not yet')])).toBe('not yet');
  const second = reporting(liar, again.call_id);
  second.started();
  second.exited(0);
  second.end();
  expect(await early).toBe('early');
});

test('batches are listed newest first, page by page', async () => {
  const { system, ids, run } = await fleet(1);
  const made: string[] = [];
  for (const n of [1, 2, 3]) made.push((await run(`echo ${n}`, { machine_ids: ids })).id);
  const page = await system.client.batches.list({ limit: 2 });
  expect([page.total, page.has_more, page.items.map(({ command }) => command)]).toEqual([
    3,
    true,
    ['echo 3', 'echo 2'],
  ]);
  const rest = await system.client.batches.list({ limit: 2, offset: 2, sort: '-created_at' });
  expect(rest.items.map(({ id }) => id)).toEqual(made.slice(0, 1));
  expect((await system.call('GET', '/batches?sort=name')).status).toBe(400);
});

test('a machine that was never online counts as offline', async () => {
  const { system, ids, run } = await fleet(1);
  const { machineId } = await joinScripted(system);
  const batch = await run('true', { machine_ids: [machineId, ...ids] });
  expect(batch.results.map(({ reason }) => reason)).toEqual(['machine_offline', null]);
});

test('a member fails if the owner of its machine does not allow commands, and the others run', async () => {
  const { system, ids, run } = await fleet(1);
  const locked = await system.agent({ flags: ['--allow', 'metrics'] });
  const batch = await run('echo here', { machine_ids: [locked.machineId, ...ids] });
  expect(batch).toMatchObject({ status: 'failed', counts: { completed: 1, failed: 1 } });
  expect(batch.results[0]?.reason).toMatch(/^permission_denied/);
});

test('a batch that a full queue refuses is recorded as refused, whichever of its machines has that queue', async () => {
  const { system, ids } = await largeFleet(101);
  const { begin } = commandsOn(system, ids.at(-1)!);
  for (let n = 0; n < 16; n += 1)
    await Promise.all(Array.from({ length: 64 }, () => begin('true', { queue_for: hour })));
  const body = { machine_ids: ids, command: 'true', queue_for: hour, wait: 0 };
  expect(await system.call('POST', '/commands/batch', { body })).toMatchObject({ status: 503 });
  const { items } = await system.client.audit.list({ action: 'batches.create' });
  expect(items.map(({ result }) => result)).toEqual(['unavailable']);
});

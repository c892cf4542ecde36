// Saved commands: a program and its arguments with typed parameters, run on machines and by schedules.
import { spawn } from 'node:child_process';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { expect, onTestFinished, test } from 'vitest';
import { leapingClock, soon } from './commands-fixture.ts';
import { startFarhand, temporaryFolder } from './start-farhand.ts';
import { waitFor } from './wait-for.ts';

async function started() {
  const system = await startFarhand();
  const agents = [
    await system.agent({ name: 'm0', tags: 'web' }),
    await system.agent({ name: 'm1', tags: 'web' }),
  ];
  const ids = agents.map(({ machineId }) => machineId);
  const { client } = system;
  return {
    ...{ system, client, ids },
    save: (more: object = {}) =>
      client.savedCommands.create({
        name: 'greet',
        argv: ['echo', '{{x}}'],
        parameters: [{ name: 'x', type: 'string' }],
        ...more,
      }),
    /** Runs a saved command on the first machine. Resolves with its output, or with the name of the wrong field. */
    async output(saved_command_id: string, parameters: object): Promise<string> {
      const body = { machine_ids: [ids[0]], parameters };
      const answer = await system.call('POST', `/saved-commands/${saved_command_id}/run`, { body });
      if (answer.status === 201) return answer.body.data.results[0].stdout;
      return `${answer.status} ${answer.body.error.details.issues?.[0]?.path}`;
    },
  };
}

test.each([
  ['a program that is a parameter', { argv: ['{{x}}'] }, 'argv.0'],
  ['a placeholder without a parameter', { argv: ['echo', '{{y}}'] }, 'argv.1'],
  ['a broken placeholder', { argv: ['echo', '{{x}'] }, 'argv.1'],
  ['no program', { argv: [] }, 'argv'],
  [
    'two parameters of one name',
    {
      parameters: [
        { name: 'x', type: 'string' },
        { name: 'x', type: 'path' },
      ],
    },
    'parameters',
  ],
  [
    'a range without a number',
    { parameters: [{ name: 'x', type: 'integer', min: 5, max: 1 }] },
    'parameters.0.max',
  ],
  ['an enum without values', { parameters: [{ name: 'x', type: 'enum' }] }, 'parameters.0.values'],
  [
    'a string with a list of values',
    { parameters: [{ name: 'x', type: 'string', values: ['a'] }] },
    'parameters.0.values',
  ],
  [
    'an integer with a pattern',
    { parameters: [{ name: 'x', type: 'integer', pattern: 'a' }] },
    'parameters.0.pattern',
  ],
  [
    'a pattern that is no regular expression',
    { parameters: [{ name: 'x', type: 'string', pattern: '(' }] },
    'parameters.0.pattern',
  ],
  [
    'a default that is not allowed',
    { parameters: [{ name: 'x', type: 'integer', default: 'a' }] },
    'parameters.0.default',
  ],
  ['an empty default', { parameters: [{ name: 'x', type: 'string', default: '' }] }, 'parameters.0.default'],
  [
    'an optional parameter that is only a part of an argument',
    { argv: ['rm', '/srv/{{x}}'], parameters: [{ name: 'x', type: 'string', required: false }] },
    'argv.1',
  ],
  ['a name with a dash', { parameters: [{ name: 'x-y', type: 'string' }] }, 'parameters.0.name'],
])('%s is refused, and the answer names the field', async (_what, more, path) => {
  const { system } = await started();
  const body = { name: 'x', argv: ['echo', '{{x}}'], parameters: [{ name: 'x', type: 'string' }], ...more };
  const answer = await system.call('POST', '/saved-commands', { body });
  expect([answer.status, answer.body.error.details.issues[0].path]).toEqual([422, path]);
  expect((await system.client.savedCommands.list()).total).toBe(0);
});

test('a refused default is answered with the reason', async () => {
  const { system } = await started();
  // The clock stands still, so the broker measures that no time has passed. Only the timeout that Node sets for the
  // regular expression can refuse the last value.
  leapingClock({ still: true });
  const defaults = [
    [{ type: 'integer', default: 11, max: 10 }, 'must be at most 10'],
    [{ type: 'string', default: 'A', pattern: '[a-z]+' }, 'must match [a-z]+'],
    [{ type: 'string', default: 'a'.repeat(40), pattern: '(a+)+b' }, 'took too long to compare with (a+)+b'],
  ] as const;
  for (const [more, reason] of defaults) {
    const body = { name: 'x', argv: ['echo', '{{x}}'], parameters: [{ name: 'x', ...more }] };
    const answer = await system.call('POST', '/saved-commands', { body });
    expect(answer.body.error.message).toContain(`parameters.0.default: ${reason}`);
  }
});

test('a value is one argument or a part of one: it is not passed to a shell, and never split', async () => {
  const { save, output } = await started();
  const { id } = await save({ argv: ['printf', '[%s]', '{{x}}', 'a={{x}}'] });
  for (const x of ['two words', '$(id) `id`; id | cat > /x', '"\'', '{{x}}', '$& $1', 'ü'])
    expect(await output(id, { x })).toBe(`[${x}][a=${x}]`);
});

test('each type has its values, and a wrong one is named before anything runs', async () => {
  const { client, save, output } = await started();
  const parameters = [
    { name: 's', type: 'string' as const, default: 'd' },
    { name: 'p', type: 'string' as const, pattern: '-?[a-z]+', default: 'd' },
    { name: 'q', type: 'string' as const, pattern: '[a-z]*', default: 'd' },
    { name: 'i', type: 'integer' as const, max: 10, default: 1 },
    { name: 'n', type: 'integer' as const, min: -5, required: false },
    { name: 'b', type: 'boolean' as const, default: false },
    { name: 'e', type: 'enum' as const, values: ['a', 'b c'], default: 'a' },
    { name: 'f', type: 'path' as const, default: '/etc' },
  ];
  const argv = ['printf', '[%s]', ...parameters.map(({ name }) => `{{${name}}}`)];
  const { id } = await save({ argv, parameters });
  // The parameter without a value and without a default is left out.
  expect(await output(id, {})).toBe('[d][d][d][1][false][a][/etc]');
  const good = { s: 'S', p: '-x', q: '', i: 10, n: -5, b: true, e: 'b c', f: '/var/a b' };
  expect(await output(id, good)).toBe('[S][-x][][10][-5][true][b c][/var/a b]');
  // The command line sends all values as strings.
  expect(await output(id, { i: '10', b: 'true' })).toBe('[d][d][d][10][true][a][/etc]');
  // Whole numbers are normalized.
  expect(await output(id, { i: '007', n: '-000' })).toBe('[d][d][d][7][0][false][a][/etc]');
  expect(await output(id, { i: '-0' })).toBe('[d][d][d][0][false][a][/etc]');
  const before = (await client.commands.list()).total;
  for (const wrong of [
    ...[
      { s: '' },
      { s: '-rf' },
      { s: 'a\0' },
      { s: 'x'.repeat(4097) },
      { p: 'A' },
      { p: 'a\n' },
      { i: 11 },
      { i: -1 },
      { i: 1.5 },
    ],
    ...[{ i: '' }, { n: -6 }, { b: 'yes' }, { e: 'c' }, { f: 'etc' }, { f: '/a/../b' }, { z: 'unknown' }],
  ]) {
    const [name] = Object.keys(wrong);
    const path =
      name === 's' && String(wrong.s).length > 4096
        ? expect.stringContaining('422')
        : `422 parameters.${name}`;
    expect([wrong, await output(id, wrong)]).toEqual([wrong, path]);
  }
  expect((await client.commands.list()).total).toBe(before);
});

test('values that make the arguments too long are refused before anything is stored', async () => {
  const { system, ids, save } = await started();
  const { id } = await save({ argv: ['echo', ...Array.from({ length: 8 }, () => '{{x}}'.repeat(3276))] });
  const body = { machine_ids: [ids[0]], parameters: { x: 'x'.repeat(4096) } };
  const { status, body: answer } = await system.call('POST', `/saved-commands/${id}/run`, { body });
  expect([status, answer.error.message]).toEqual([422, expect.stringContaining('64 KiB')]);
  expect((await system.client.batches.list()).total).toBe(0);
});

test('a required parameter must be given', async () => {
  const { save, output } = await started();
  const { id } = await save();
  expect(await output(id, {})).toBe('422 parameters.x');
});

test('a required parameter must be given although it has a default, or the name of a property of all objects', async () => {
  const { save, output } = await started();
  const withDefault = { name: 'x', type: 'boolean', default: false, required: true };
  const { id } = await save({ parameters: [withDefault] });
  expect(await output(id, {})).toBe('422 parameters.x');
  expect(await output(id, { x: true })).toBe('true\n');
  const named = { argv: ['echo', '{{constructor}}'], parameters: [{ name: 'constructor', type: 'string' }] };
  const { id: other } = await save({ name: 'other', ...named });
  expect(await output(other, {})).toBe('422 parameters.constructor');
});

test('parameters can be sent back as they were read', async () => {
  const { client, save } = await started();
  const { id, parameters } = await save();
  const sent = await client.savedCommands.update({ saved_command_id: id, parameters });
  expect(sent.parameters).toEqual(parameters);
});

test('a pattern that would take hours costs a tenth of a second', async () => {
  const { save, output } = await started();
  const { id } = await save({ parameters: [{ name: 'x', type: 'string', pattern: '(a+)+b' }] });
  const before = process.cpuUsage();
  expect(await output(id, { x: 'a'.repeat(60) })).toBe('422 parameters.x');
  expect(process.cpuUsage(before).user / 1000).toBeLessThan(1000);
});

test('all patterns of one request together have 50 ms of CPU time', async () => {
  const { save, output } = await started();
  // Each value alone matches within a few milliseconds, so only the limit for all together can refuse the request.
  const names = Array.from({ length: 50 }, (_, n) => `p${n}`);
  const parameters = names.map((name) => ({
    ...{ name, type: 'string' as const, pattern: 'a*a*b|a*', required: false },
  }));
  const { id } = await save({ argv: ['true'], parameters });
  const before = process.cpuUsage();
  const values = Object.fromEntries(names.map((name) => [name, 'a'.repeat(3000)]));
  expect(await output(id, values)).toMatch(/^422 parameters\.p\d+$/);
  expect(process.cpuUsage(before).user / 1000).toBeLessThan(400);
});

test('an ordinary value is not refused if the broker had to wait for a CPU', async () => {
  // Matches the value, which takes a few milliseconds, until a match has been interrupted. Prints the outcome of that.
  const script = `
    import { commandWith } from '${join(import.meta.dirname, '../broker/commands/saved-command-parameters.ts')}';
    const parameter = { name: 'x', type: 'string', pattern: 'a*a*b|a*', required: true, default: null };
    const saved = { argv: ['echo', '{{x}}'], parameters: [parameter], user: null, cwd: null, timeout: null };
    commandWith(saved, { x: 'a'.repeat(1000) });
    console.log('matching');
    for (let began = performance.now(), took = 0, outcome; took < 100; began += took) {
      outcome = 'accepted';
      try { commandWith(saved, { x: 'a'.repeat(1000) }); } catch ({ message }) { outcome = message; }
      took = performance.now() - began;
      if (took >= 100) console.log(outcome);
    }`;
  const child = spawn(process.execPath, ['--input-type=module', '-e', script]);
  onTestFinished(() => void child.kill('SIGKILL'));
  const lines = createInterface(child.stdout)[Symbol.asyncIterator]();
  expect((await lines.next()).value).toBe('matching');
  const pass = async (ms: number): Promise<void> => {
    const began = performance.now();
    await waitFor(() => expect(performance.now() - began).toBeGreaterThan(ms));
  };
  // Right after its output, the program would be stopped between two matches.
  await pass(50);
  child.kill('SIGSTOP');
  await pass(150);
  child.kill('SIGCONT');
  expect((await lines.next()).value).toBe('accepted');
});

test('only a key that may change and read schedules changes or deletes a saved command that a schedule runs', async () => {
  const { system, client, ids, save } = await started();
  const { id, updated_by } = await save({ argv: ['true'], parameters: [] });
  const { id: schedule_id } = await client.schedules.create({
    ...{ name: 'x', machine_id: ids[0] ?? '', saved_command_id: id, cron: '@yearly', env: { SECRET: 'a' } },
  });
  const path = `/saved-commands/${id}`;
  for (const [scopes, missing] of [
    [['commands:execute'], 'schedules:write'],
    [['commands:execute', 'schedules:write'], 'schedules:read'],
  ] as const) {
    const { key } = await system.keyed([...scopes]);
    for (const [method, body] of [['PATCH', { argv: ['env'] }], ['DELETE']] as const) {
      const { status, body: answer } = await system.call(method, path, { key, ...(body && { body }) });
      expect([method, status, answer.error.details.required_scope]).toEqual([method, 403, missing]);
    }
  }
  expect(await client.savedCommands.get({ saved_command_id: id })).toMatchObject({
    argv: ['true'],
    updated_by,
  });
  const all = await system.keyed(['commands:execute', 'schedules:write', 'schedules:read']);
  await all.client.savedCommands.update({ saved_command_id: id, timeout: 1000 });
  await client.schedules.remove({ schedule_id });
  const weak = await system.keyed(['commands:execute']);
  expect((await system.call('PATCH', path, { key: weak.key, body: { argv: ['id'] } })).status).toBe(200);
});

test('the answer to a revocation lists the saved commands that the key changed last', async () => {
  const { system, client, save } = await started();
  const [{ id }] = [await save(), await save({ name: 'other' })];
  const weak = await system.keyed(['commands:execute']);
  const { id: key_id } = await weak.client.keys.me();
  await weak.client.savedCommands.update({ saved_command_id: id, timeout: 1000 });
  expect(await client.keys.remove({ key_id })).toMatchObject({ saved_commands: [id] });
});

test('a saved command runs on all machines with the tags that the caller may use, and no others', async () => {
  const { system, client, ids, save } = await started();
  const { id: saved_command_id } = await save();
  const parameters = { x: 'hello' };
  const all = await client.batches.runSaved({ saved_command_id, tags: ['web'], parameters });
  expect(all).toMatchObject({ status: 'completed', command: 'echo', args: ['hello'], total: 2 });
  const scopes = ['commands:execute', 'commands:read'] as const;
  const limited = await system.keyed([...scopes], { machine_ids: [ids[1] ?? ''] });
  const some = await limited.client.batches.runSaved({ saved_command_id, tags: ['web'], parameters });
  expect(some.results.map(({ machine_id }) => machine_id)).toEqual([ids[1]]);
  const beyond = { saved_command_id, machine_ids: [...ids], parameters };
  await expect(limited.client.batches.runSaved(beyond)).rejects.toMatchObject({ code: 'forbidden' });
  const reader = await system.keyed(['commands:read']);
  expect((await reader.client.savedCommands.get({ saved_command_id })).name).toBe('greet');
  await expect(reader.client.batches.runSaved(beyond)).rejects.toMatchObject({ code: 'forbidden' });
});

test('a key that is limited to machines cannot create, change or delete what others run', async () => {
  const { system, ids, save } = await started();
  const { id } = await save();
  const scopes = ['commands:execute', 'commands:read'] as const;
  const { key } = await system.keyed([...scopes], { machine_ids: [ids[0] ?? ''] });
  const body = { name: 'mine', argv: ['id'] };
  for (const [method, path] of [
    ['POST', '/saved-commands'],
    ['PATCH', `/saved-commands/${id}`],
    ['DELETE', `/saved-commands/${id}`],
  ] as const) {
    const answer = await system.call(method, path, { key, ...(method !== 'DELETE' && { body }) });
    expect([method, answer.status, answer.body.error.code]).toEqual([method, 403, 'forbidden']);
  }
});

test('names are unique, and changes are checked like new ones', async () => {
  const { client, save } = await started();
  const made = await save();
  await expect(save()).rejects.toMatchObject({ code: 'conflict' });
  const saved_command_id = made.id;
  await expect(client.savedCommands.update({ saved_command_id, parameters: [] })).rejects.toMatchObject({
    code: 'validation_failed',
  });
  const changed = await client.savedCommands.update({ saved_command_id, argv: ['printf', '{{x}}'] });
  expect(changed).toMatchObject({ name: 'greet', argv: ['printf', '{{x}}'], parameters: made.parameters });
  expect(await client.savedCommands.remove({ saved_command_id })).toEqual({ deleted: true });
});

test('a request repeated with the same Idempotency-Key runs nothing twice', async () => {
  const { system, client, save } = await started();
  const { id } = await save();
  const params = { body: { tags: ['web'], parameters: { x: 'a' } }, headers: { 'Idempotency-Key': 'once' } };
  const first = await system.call('POST', `/saved-commands/${id}/run`, params);
  const again = await system.call('POST', `/saved-commands/${id}/run`, params);
  expect([first.status, again.body.data.id]).toEqual([201, first.body.data.id]);
  expect((await client.batches.list()).total).toBe(1);
});

test('a schedule runs a saved command with its values, as the command is at that time', async () => {
  const { client, ids, save, system } = await started();
  const folder = temporaryFolder('saved');
  const { id: saved_command_id } = await save({ argv: ['touch', `${folder}/{{x}}`] });
  const [machine_id = ''] = ids;
  const body = { machine_id, name: 'job', cron: '@yearly', saved_command_id };
  const { error } = (await system.call('POST', '/schedules', { body })).body;
  expect([error.code, error.details.issues[0].path]).toEqual(['validation_failed', 'parameters.x']);
  for (const other of [{ command: 'true' }, { command: 'true', saved_command_id: undefined, parameters: {} }])
    expect((await system.call('POST', '/schedules', { body: { ...body, ...other } })).status).toBe(422);
  const made = await client.schedules.create({ ...body, parameters: { x: 'a b' } });
  const schedule_id = made.id;
  expect(made).toMatchObject({ command: null, saved_command_id, parameters: { x: 'a b' } });
  const run = async (status: string) => {
    const { total } = await client.schedules.history({ schedule_id });
    await client.schedules.run({ schedule_id }).catch(() => {});
    const last = async () => {
      const page = await client.schedules.history({ schedule_id });
      return [page.total, page.items[0]?.status];
    };
    await soon(last).toEqual([total + 1, status]);
    return (await client.schedules.history({ schedule_id })).items[0];
  };
  const first = await run('completed');
  const command = await client.commands.get({ command_id: first?.command_id ?? '' });
  expect([command.command, command.args]).toEqual(['touch', [`${folder}/a b`]]);
  await expect(client.savedCommands.remove({ saved_command_id })).rejects.toMatchObject({ code: 'conflict' });

  // After this change the schedule's values are wrong, so its run fails and names the parameter.
  const parameters = [{ name: 'x', type: 'integer' as const }];
  await client.savedCommands.update({ saved_command_id, parameters });
  expect((await run('failed'))?.reason).toContain('parameters.x');
  await client.schedules.update({ schedule_id, parameters: { x: 5 } });
  await run('completed');
  const plain = await client.schedules.update({ schedule_id, command: 'true' });
  expect(plain).toMatchObject({ command: 'true', saved_command_id: null, parameters: null });
  await run('completed');
  await client.savedCommands.remove({ saved_command_id });
});

test('a schedule keeps its parameter values if an update names the same saved command, and drops them for another', async () => {
  const { client, ids, save } = await started();
  const parameters = [{ name: 'x', type: 'string', default: 'all' }];
  const { id: saved_command_id } = await save({ parameters });
  const other = await save({ name: 'other', parameters });
  const [machine_id = ''] = ids;
  const { id: schedule_id } = await client.schedules.create({
    ...{ machine_id, name: 'job', cron: '@yearly', saved_command_id, parameters: { x: 'one' } },
  });
  const updated = async (more: object) =>
    (await client.schedules.update({ schedule_id, ...more })).parameters;
  expect(await updated({ tags: ['web'], saved_command_id })).toEqual({ x: 'one' });
  expect(await updated({ saved_command_id, parameters: { x: 'two' } })).toEqual({ x: 'two' });
  expect(await updated({ saved_command_id: other.id })).toEqual({});
});

// The audit log of a machine: who did what and when, with which result, and never any content.
import { mkdirSync, readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { Lines } from '../../agent/audit-log/json-lines-writer.ts';
import { type AgentHandle, quiet, startFarhand, temporaryFolder } from '../start-farhand.ts';

type Line = Record<string, unknown>;

/** Closes the agent, and returns all lines of its log. */
async function linesOf(agent: AgentHandle): Promise<Line[]> {
  await agent.close();
  return read(join(agent.dataDir, 'activity.log'));
}

const read = (file: string): Line[] =>
  readFileSync(file, 'utf8')
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line));

const of = (lines: Line[], method: string): Line[] => lines.filter((line) => line.method === method);

test('calls that the owner does not allow are logged with the key that made them', async () => {
  const system = await startFarhand();
  const agent = await system.agent({ flags: ['--allow', 'metrics,files:read'] });
  const { key, client } = await system.keyed(['files:write', 'files:read']);
  const { id } = await client.keys.me();
  const { machineId: machine_id } = agent;
  const move = { source: '/tmp/never', destination: '/tmp/ever' };
  expect((await system.call('POST', `/machines/${machine_id}/files/move`, { key, body: move })).status).toBe(
    403,
  );
  const put = { path: '/tmp/never', content: 'secret' };
  expect((await system.call('PUT', `/machines/${machine_id}/files/content`, { key, body: put })).status).toBe(
    403,
  );
  const lines = await linesOf(agent);
  expect(of(lines, 'MoveFile')).toEqual([
    expect.objectContaining({
      ...{ event: 'end', ...move, key_id: id, key_name: 'limited', result: 'permission_denied' },
      request_id: expect.stringMatching(/^req_/),
      at: expect.stringMatching(/Z$/),
    }),
  ]);
  expect(of(lines, 'WriteFile')).toEqual([
    expect.objectContaining({ event: 'end', key_id: id, result: 'permission_denied' }),
  ]);
});

test('contents, input and environment are never logged; paths and commands are', async () => {
  const system = await startFarhand();
  const agent = await system.agent();
  const { machineId: machine_id } = agent;
  const folder = temporaryFolder('activity');
  const files = `/machines/${machine_id}/files`;
  const body = { path: join(folder, 'a'), content: 'S3CRET' };
  expect((await system.call('PUT', `${files}/content`, { body })).status).toBeLessThan(300);
  expect((await system.call('GET', `${files}/content?path=${folder}/a`)).status).toBe(200);
  expect((await system.call('GET', `${files}/content?path=${folder}/none`)).status).toBe(404);
  expect((await system.call('GET', `${files}/search?path=${folder}&content=S3CRET`)).status).toBe(200);
  const order = { machine_id, command: 'cat', env: { TOKEN: 'S3CRET' }, stdin: 'S3CRET', cwd: folder };
  expect((await system.call('POST', '/commands', { body: order })).body.data.exit_code).toBe(0);
  const failing = { machine_id, command: 'sh', args: ['-c', 'exit 3'] };
  expect((await system.call('POST', '/commands', { body: failing })).body.data.exit_code).toBe(3);
  await system.call('GET', `/machines/${machine_id}/status`);

  const lines = await linesOf(agent);
  expect(readFileSync(join(agent.dataDir, 'activity.log'), 'utf8')).not.toContain('S3CRET');
  expect(of(lines, 'WriteFile')).toEqual([
    expect.objectContaining({ path: `${folder}/a`, key_name: 'test', result: 'ok', ms: expect.any(Number) }),
  ]);
  expect(of(lines, 'ReadFile').map(({ path, result }) => [path, result])).toEqual([
    [`${folder}/a`, 'ok'],
    [`${folder}/none`, 'file_not_found'],
  ]);
  expect(of(lines, 'SearchFiles')).toEqual([expect.objectContaining({ in_contents: true, result: 'ok' })]);
  const [begun, over, , exited] = of(lines, 'StartProcess');
  expect(begun).toMatchObject({ event: 'start', command: 'cat', cwd: folder, key_name: 'test' });
  expect(over).toMatchObject({ event: 'end', id: begun?.id, outcome: 'exited', exit_code: 0, result: 'ok' });
  expect(exited).toMatchObject({ command: 'sh', args: ['-c', 'exit 3'], exit_code: 3 });
  expect(of(lines, 'GetMetrics')).toEqual([]);
});

test('a schedule’s command is logged with the key of the schedule, a terminal with that of its client', async () => {
  const system = await startFarhand();
  const agent = await system.agent();
  const { machineId: machine_id } = agent;
  const { id } = await system.client.keys.me();
  const params = { machine_id, name: 'nightly', cron: '0 0 1 1 *', command: 'true' };
  const schedule = (await system.call('POST', '/schedules', { body: params })).body.data.id;
  const { command_id } = (await system.call('POST', `/schedules/${schedule}/run`)).body.data;
  await expect
    .poll(async () => (await system.call('GET', `/commands/${command_id}`)).body.data.status)
    .toBe('completed');
  const session = await system.client.sessions.create({ machine_id, shell: '/bin/sh' });
  await system.client.sessions.end({ session_id: session.id });
  const lines = await linesOf(agent);
  expect(of(lines, 'StartProcess')[0]).toMatchObject({ id: command_id, key_id: id, key_name: 'test' });
  expect(of(lines, 'OpenTerminal')[0]).toMatchObject({
    event: 'start',
    id: session.id,
    command: '/bin/sh',
    key_id: id,
  });
  expect(of(lines, 'KillProcess')[0]).toMatchObject({ id: session.id, key_id: id });
});

test('the log is private and protected from the file API, and a command is logged within a second', async () => {
  const system = await startFarhand();
  const agent = await system.agent();
  const { machineId: machine_id, dataDir } = agent;
  const file = join(dataDir, 'activity.log');
  await system.call('POST', '/commands', { body: { machine_id, command: 'true' } });
  await expect.poll(() => readFileSync(file, 'utf8')).toContain('StartProcess');
  expect(statSync(file).mode & 0o777).toBe(0o600);
  expect(of(read(file), 'StartProcess')).toHaveLength(2);
  const files = `/machines/${machine_id}/files`;
  expect((await system.call('GET', `${files}/content?path=${file}`)).status).toBe(403);
  expect((await system.call('DELETE', `${files}?path=${file}`)).status).toBe(403);
});

test('a full file becomes the first of four old ones, and an incomplete line is not continued', async () => {
  const directory = temporaryFolder('lines');
  writeFileSync(join(directory, 'x.log'), '{"torn":');
  for (let count = 0; count < 8; count += 1) {
    const lines = await Lines.open(directory, 'x', quiet, { fileBytes: 100 });
    lines.add({ count, pad: 'x'.repeat(60) });
    await lines.close();
  }
  expect(readdirSync(directory).sort()).toEqual(['x.1.log', 'x.2.log', 'x.3.log', 'x.4.log', 'x.log']);
  const counts = ['x.4.log', 'x.3.log', 'x.2.log', 'x.1.log', 'x.log'].map(
    (name) => read(join(directory, name))[0]?.count,
  );
  expect(counts).toEqual([3, 4, 5, 6, 7]);

  const torn = temporaryFolder('torn');
  writeFileSync(join(torn, 'x.log'), '{"torn":');
  const lines = await Lines.open(torn, 'x', quiet);
  lines.add({ whole: '\u009b2J\u001b' });
  await lines.close();
  expect(readFileSync(join(torn, 'x.log'), 'utf8')).toBe('{"torn":\n{"whole":"\\u009b2J\\u001b"}\n');
});

test('calls are answered while the log cannot be written, and the missing lines are counted later', async () => {
  const directory = join(temporaryFolder('gone'), 'not-there-yet');
  const lines = await Lines.open(directory, 'x', quiet);
  lines.add({ lost: true });
  await lines.close();
  mkdirSync(directory);
  lines.add({ kept: true });
  await lines.close();
  expect(readFileSync(join(directory, 'x.log'), 'utf8').trim().split('\n')).toEqual([
    '{"dropped_lines":1}',
    '{"kept":true}',
  ]);
});

test('more lines than the disk takes at once are written in order', async () => {
  const directory = temporaryFolder('many');
  const lines = await Lines.open(directory, 'x', quiet);
  // All lines are added in one turn of the event loop, so the second batch fills up while the first is being written.
  const many = Array.from({ length: 300 }, (_, count) => ({ count, pad: 'x'.repeat(3_000) }));
  for (const line of many) lines.add(line);
  await lines.close();
  expect(read(join(directory, 'x.log')).map(({ count }) => count)).toEqual(many.map(({ count }) => count));
});

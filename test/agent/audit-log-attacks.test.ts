// The audit log of a machine whose broker tries to hide its calls, to flood the log or to deceive its reader.
import { execFileSync } from 'node:child_process';
import { existsSync, readFileSync, renameSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { AuditLog } from '../../agent/audit-log/index.ts';
import { Lines } from '../../agent/audit-log/json-lines-writer.ts';
import { brokerText } from '../../agent/link/dial.ts';
import { fakeClock } from '../fake-clock.ts';
import { scriptedBroker } from '../scripted-broker.ts';
import { quiet, temporaryFolder } from '../start-farhand.ts';

type Line = Record<string, unknown>;

const textIn = (directory: string): string => readFileSync(join(directory, 'activity.log'), 'utf8');
const linesIn = (directory: string): Line[] =>
  textIn(directory)
    .split('\n')
    .filter((line) => line !== '')
    .map((line) => JSON.parse(line));
const callOf = (method: string, more = {}) => ({ method, request_id: 'req_1', caller: null, ...more });

test('no line is longer than 8 KiB, and each line has its end whatever the broker sends', async () => {
  const directory = temporaryFolder('long');
  const activity = await AuditLog.open(directory, quiet);
  const evil = '\u0001'.repeat(100_000);
  const caller = { key_id: evil, key_name: '\ud83d\ude00'.repeat(1_000) };
  const entry = activity.begin(callOf('StartProcess', { request_id: evil, caller }));
  entry.asked({ id: 'cmd_1', spec: { command: evil, direct: true, args: Array(1_000).fill(evil) } });
  entry.ended('ok');
  await activity.close();
  for (const line of textIn(directory).trim().split('\n'))
    expect(Buffer.byteLength(line)).toBeLessThan(8_192);
  expect(linesIn(directory)[1]).toMatchObject({
    event: 'end',
    method: 'StartProcess',
    id: 'cmd_1',
    result: 'ok',
  });
});

test('after five refusals of a kind further ones are only counted, and other entries are logged', async () => {
  const directory = temporaryFolder('refused');
  const activity = await AuditLog.open(directory, quiet);
  for (let n = 0; n < 100; n += 1) {
    activity.begin(callOf('StartProcess'), true).ended('permission_denied');
    activity.begin(callOf(`made up ${n}`), true).ended('not_supported');
    const outside = activity.begin(callOf('ReadFile'));
    outside.asked({ path: Buffer.from('/etc/shadow') });
    outside.ended('permission_denied');
    if (n === 50) activity.begin(callOf('StatFile')).ended('ok');
  }
  await activity.close();
  const lines = linesIn(directory);
  expect(lines.filter(({ event }) => event === 'end')).toHaveLength(16);
  expect(lines.filter(({ event }) => event === 'more').map(({ method, more }) => [method, more])).toEqual([
    ['StartProcess', 95],
    ['unknown', 95],
    ['ReadFile', 95],
  ]);
  expect(lines.filter(({ result }) => result === 'ok')).toHaveLength(1);
});

test('a call that runs for over a second is logged, and a finished call whose answer did not arrive is logged as ok', async () => {
  const clock = fakeClock(Date.now());
  const directory = temporaryFolder('slow');
  const activity = await AuditLog.open(directory, quiet);
  const slow = activity.begin(callOf('ReadFile'));
  slow.asked({ path: Buffer.from('/secret') });
  const written = activity.begin(callOf('WriteFile'));
  written.asked({ open: { path: Buffer.from('/a') } });
  written.done();
  written.ended('gave_up');
  await clock.advance(1_000);
  await activity.close();
  expect(linesIn(directory)).toEqual([
    expect.objectContaining({ event: 'end', path: '/a', result: 'ok', unheard: true }),
    expect.objectContaining({ event: 'start', method: 'ReadFile', path: '/secret' }),
  ]);
});

test('a removed log file is created again, and a full one is rotated without losing a line', async () => {
  const directory = temporaryFolder('taken');
  const lines = await Lines.open(directory, 'activity', quiet, { fileBytes: 40, gatherMs: 0 });
  onTestFinished(() => lines.close());
  lines.add({ first: 'x'.repeat(30) });
  await expect.poll(() => textIn(directory)).toContain('first');
  renameSync(join(directory, 'activity.log'), join(directory, 'gone'));
  lines.add({ second: 'x'.repeat(30) });
  await expect
    .poll(() => existsSync(join(directory, 'activity.log')) && textIn(directory))
    .toContain('second');
  lines.add({ third: 'x'.repeat(30) });
  await expect.poll(() => textIn(directory)).toContain('third');
  expect(readFileSync(join(directory, 'activity.1.log'), 'utf8')).toContain('second');
});

test('many calls with one id count as one call, and a call whose id fits no header is ignored', async () => {
  const broker = await scriptedBroker();
  const { agent, dataDir } = await broker.agent(['--allow', 'files:read']);
  const call_id = 'call_same';
  // The stream of this call opens and stays open, but the broker sends no request on it.
  const held = broker.call('ReadFile', {}, { call_id, request_follows: true });
  for (let n = 0; n < 50; n += 1) void broker.call('StatFile', { path: Buffer.from('/tmp') }, { call_id });
  void broker.call('StatFile', { path: Buffer.from('/tmp') }, { call_id: 'a\u0001b' });
  expect((await broker.call('StatFile', { path: Buffer.from('/tmp') })).code).toBe('ok');
  void held;
  await agent.close();
  expect(linesIn(dataDir).filter(({ method }) => method === 'StatFile')).toHaveLength(1);
});

test('texts of the broker are cut and sanitized in the agent’s own log', () => {
  expect(brokerText(`\u001b[2J\u009b\u202e\u2028a${'x'.repeat(1_000)}`)).toMatch(
    /^\ufffd\[2J\ufffd{3}ax{192}$/,
  );
});

const hasJq = ((): boolean => {
  try {
    execFileSync('jq', ['--version']);
    return true;
  } catch {
    return false;
  }
})();

test.runIf(hasJq)(
  'the commands in docs/locks.md print no control characters of a hostile broker',
  async () => {
    const directory = temporaryFolder('recipe');
    const evil = '\u001b]0;own\u0007\u009b2J\u202e\u2066\u2028\n\tfake';
    const activity = await AuditLog.open(directory, quiet);
    const entry = activity.begin(callOf('ReadFile', { caller: { key_id: 'k', key_name: evil } }));
    entry.asked({ path: Buffer.from(`/etc/${evil}`) });
    entry.ended('permission_denied');
    await activity.close();
    // biome-ignore lint/suspicious/noControlCharactersInRegex: the test looks for these characters
    const obeyed = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u2028-\u202e\u2066-\u2069]/;
    expect(textIn(directory)).not.toMatch(obeyed);
    const text = readFileSync(join(import.meta.dirname, '../../docs/locks.md'), 'utf8');
    const recipe = /```sh\ncd \S+\n([\s\S]*?)```/.exec(text)?.[1] ?? '';
    writeFileSync(join(directory, 'activity.1.log'), '');
    const printed = execFileSync('sh', ['-ec', recipe.replace('tail -F', 'cat')], {
      cwd: directory,
      encoding: 'utf8',
    });
    expect(printed.trim().split('\n')).toHaveLength(2);
    expect(printed).toContain('fake\tReadFile\t');
    expect(printed).not.toMatch(obeyed);
  },
);

// Input and signals for running commands.
import { expect, test } from 'vitest';
import { bodyBytes, output } from './commands-fixture.ts';
import { startWithAgent, statusAndCode } from './start-farhand.ts';

async function onMachine() {
  const { system, machine_id } = await startWithAgent();
  const start = async (body: object): Promise<string> => {
    const answer = await system.call('POST', '/commands', { body: { machine_id, wait: 0, ...body } });
    return answer.body.data.id;
  };
  const say = (id: string, body: object) => system.call('POST', `/commands/${id}/input`, { body });
  const outputOf = async (id: string, stream = 'stdout'): Promise<Buffer> =>
    bodyBytes(await output(system, id, `stream=${stream}&follow=true`));
  /** Resolves when the command has written this number of bytes. */
  const wrote = (id: string, bytes: number) =>
    expect
      .poll(async () => (await system.client.commands.get({ command_id: id })).stdout_bytes)
      .toBeGreaterThanOrEqual(bytes);
  return { system, machine_id, start, say, outputOf, wrote };
}

test.each([
  ['characters that are not base64', { data: 'aGk=!!', encoding: 'base64' }],
  ['base64 without padding', { data: 'QQ', encoding: 'base64' }],
  ['a lone surrogate', { data: 'x\ud800y' }],
])('input with %s is refused, and the command receives nothing of it', async (_, wrong) => {
  const { start, say, outputOf } = await onMachine();
  const id = await start({ command: 'cat', input: true });
  expect(statusAndCode(await say(id, wrong))).toEqual([422, 'validation_failed']);
  expect((await say(id, { data: 'right', end: true })).body.data).toEqual({ taken: 5 });
  expect((await outputOf(id)).toString()).toBe('right');
});

test('stdin with a lone surrogate is refused', async () => {
  const { system, machine_id } = await onMachine();
  const body = { machine_id, command: 'cat', stdin: 'x\ud800y' };
  expect(statusAndCode(await system.call('POST', '/commands', { body }))).toEqual([422, 'validation_failed']);
});

test('input is refused for a command that takes none, whose input was closed, or that has ended', async () => {
  const { system, machine_id, start, say, wrote } = await onMachine();
  const without = await start({ command: 'echo; sleep 600' });
  await wrote(without, 1);
  expect(statusAndCode(await say(without, { data: 'x' }))).toEqual([409, 'conflict']);
  const received = await start({ command: 'echo; exec sleep 600', input: true });
  await wrote(received, 1);
  expect((await say(received, { data: 'x', end: true })).body.data).toEqual({ taken: 1 });
  expect(statusAndCode(await say(received, { data: 'y' }))).toEqual([409, 'conflict']);
  expect(statusAndCode(await say(received, { data: 'y', offset: 7 }))).toEqual([409, 'conflict']);
  await system.client.commands.cancel({ command_id: received });
  expect(statusAndCode(await say(received, { data: 'x' }))).toEqual([409, 'conflict']);
  const { items } = await system.client.machines.list();
  expect(items.map(({ id }) => id)).toEqual([machine_id]);
});

test('further input for a command that does not read is refused as unavailable, and other commands are not delayed', async () => {
  const { start, say, wrote } = await onMachine();
  const deaf = await start({ command: 'echo; exec sleep 600', input: true });
  await wrote(deaf, 1);
  const data = 'x'.repeat(400 * 1024);
  const answers = [await say(deaf, { data }), await say(deaf, { data }), await say(deaf, { data })];
  expect(answers.map(statusAndCode)).toContainEqual([503, 'unavailable']);
  const other = await start({ command: 'cat', input: true, stdin: 'a' });
  await wrote(other, 1);
  expect((await say(other, { data: 'b', end: true })).body.data).toEqual({ taken: 1 });
});

test('input comes after stdin and in order, in any encoding, and input repeated with its offset counts once', async () => {
  const { system, start, say, outputOf, wrote } = await onMachine();
  const id = await start({ command: 'cat', stdin: 'first\n', input: true });
  await wrote(id, 6);
  const bytes = Buffer.from([0, 255, 254, 10, 13]);
  const base64 = { data: bytes.toString('base64'), encoding: 'base64' };
  expect((await say(id, { ...base64, offset: 0 })).body.data).toEqual({ taken: 5 });
  expect((await say(id, { ...base64, offset: 0 })).body.data).toEqual({ taken: 5 });
  const long = 'ä'.repeat(60_000);
  expect((await say(id, { data: long, offset: 5, end: true })).body.data).toEqual({ taken: 120_005 });
  expect((await outputOf(id)).equals(Buffer.concat([Buffer.from('first\n'), bytes, Buffer.from(long)]))).toBe(
    true,
  );
  expect(await system.client.commands.get({ command_id: id })).toMatchObject({ status: 'completed' });
});

test('two clients that send input at once lose nothing, and their pieces are not mixed', async () => {
  const { start, say, outputOf, wrote } = await onMachine();
  const id = await start({ command: 'echo; exec cat', input: true });
  await wrote(id, 1);
  const parts = ['a', 'b', 'c'].map((letter) => letter.repeat(100_000));
  const answers = await Promise.all(parts.map((data) => say(id, { data })));
  expect(answers.map(({ status }) => status)).toEqual([200, 200, 200]);
  await say(id, { end: true });
  const text = (await outputOf(id)).toString().trim();
  expect(text.match(/(.)\1*/g)?.toSorted()).toEqual(parts);
});

test('a signal is sent to the command; for a command that does not run it is a conflict', async () => {
  const { system, start, wrote } = await onMachine();
  const id = await start({ command: `trap 'echo got it; exit 7' USR1; echo; while :; do sleep 0.05; done` });
  await wrote(id, 1);
  const bad = await system.call('POST', `/commands/${id}/signal`, { body: { signal: 'SIGSEGV' } });
  expect(statusAndCode(bad)).toEqual([422, 'validation_failed']);
  expect((await system.call('POST', `/commands/${id}/signal`, { body: { signal: 'SIGUSR1' } })).status).toBe(
    200,
  );
  await expect
    .poll(async () => system.client.commands.get({ command_id: id }))
    .toMatchObject({ status: 'failed', exit_code: 7, stdout: '\ngot it\n' });
  const late = await system.call('POST', `/commands/${id}/signal`, { body: { signal: 'SIGUSR1' } });
  expect(statusAndCode(late)).toEqual([409, 'conflict']);
});

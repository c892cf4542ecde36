// The verbs farhand saved-commands, up to the commands that run on the machine.
import { expect, test } from 'vitest';
import { createLine, severalProgramsMs } from '../cli-fixture.ts';
import { startFarhand } from '../start-farhand.ts';

test('saved commands are created, listed, run on machines, used by schedules and removed', {
  timeout: severalProgramsMs,
}, async () => {
  const system = await startFarhand();
  for (const name of ['web-1', 'web-2']) await system.agent({ name, tags: 'web' });
  const farhand = createLine(system);
  const wrong = await farhand('saved-commands create', ['x', '--', '{{x}}']);
  expect([wrong.code, wrong.err]).toEqual([1, expect.stringContaining('argv.0')]);
  const parameters = ['--parameter', 'word:one|two', '--parameter', 'count:integer=1'];
  const created = await farhand('saved-commands create', [
    ...['greet', ...parameters, '--', 'echo', '{{word}} {{count}}'],
  ]);
  expect(created).toMatchObject({ code: 0, out: expect.stringMatching(/^saved_\w{22}\n$/) });
  expect((await farhand('saved-commands list')).out).toMatch(/^greet +saved_\w+ +echo .+ word,count/m);
  const { out } = await farhand('saved-commands get', ['greet']);
  expect(out).toMatch(/^name +greet$/m);
  expect(out).toMatch(/^NAME +TYPE .*\nword +enum +/m);
  const mistyped = ['typed', '--parameter', 'who:str', '--', 'echo', '{{who}}'];
  expect(await farhand('saved-commands create', mistyped)).toMatchObject({
    code: 2,
    err: expect.stringContaining('str is no type; write string, integer, boolean, path, or'),
  });

  const unsaid = await farhand('saved-commands run', ['greet', '--param', 'word=one']);
  expect([unsaid.code, unsaid.err]).toEqual([2, expect.stringContaining('either by name or by --tags')]);
  const refused = await farhand('saved-commands run', ['greet', '--tags', 'web', '--param', 'word=three']);
  expect([refused.code, refused.err]).toEqual([1, expect.stringContaining('parameters.word')]);
  const param = ['--param', 'word=two', '--param', 'count=5'];
  const one = await farhand('saved-commands run', ['greet', '--machine', 'web-1', ...param]);
  expect(one).toMatchObject({ code: 0, out: 'two 5\n' });
  expect(await farhand('saved-commands run', ['greet', 'web-1', ...param])).toEqual(one);
  const named = await farhand('saved-commands run', ['greet', 'web-1', '--machine', 'web-2', ...param]);
  expect(named.out.match(/^web-\d \| two 5$/gm)).toHaveLength(2);
  const twice = await farhand('saved-commands run', ['greet', 'web-1', '--tags', 'web', ...param]);
  expect([twice.code, twice.out]).toEqual([2, '']);
  const both = await farhand('saved-commands run', ['greet', '--tags', 'web', ...param]);
  expect(
    both.out
      .trim()
      .split('\n')
      .toSorted((a, b) => a.localeCompare(b)),
  ).toEqual(['web-1 | two 5', 'web-2 | two 5']);

  const nothing = await farhand('saved-commands update', ['greet']);
  expect([nothing.code, nothing.err]).toEqual([2, expect.stringContaining('say what to change')]);
  const unknown = await farhand('saved-commands update', ['no-such-name', '--timeout', '1m']);
  expect([unknown.code, unknown.err]).toEqual([1, expect.stringContaining('no-such-name')]);
  const timed = await farhand.json('saved-commands update', ['greet', '--timeout', '1m', '--name', 'hello']);
  expect(timed).toMatchObject({ name: 'hello', timeout: 60_000, argv: ['echo', '{{word}} {{count}}'] });
  expect(timed.parameters).toHaveLength(2);
  const changed = await farhand('saved-commands update', [
    ...['hello', '--name', 'greet', '--parameter', 'word:one|two,count:integer=2'],
    ...['--', 'printf', '%s\\n', '{{count}} {{word}}'],
  ]);
  expect([changed.code, changed.out]).toEqual([0, expect.stringMatching(/^name +greet$/m)]);
  const after = await farhand('saved-commands run', ['greet', '--machine', 'web-1', '--param', 'word=two']);
  expect(after).toMatchObject({ code: 0, out: '2 two\n' });

  const schedule = await farhand.json('schedules create', [
    ...[
      '--name',
      'job',
      '--tags',
      'web',
      '--cron',
      '@yearly',
      '--saved-command',
      'greet',
      '--param',
      'word=one',
    ],
  ]);
  expect(schedule).toMatchObject({ tags: ['web'], command: null, parameters: { word: 'one' } });
  const used = await farhand('saved-commands delete', ['greet', '--yes']);
  expect([used.code, used.err]).toEqual([1, expect.stringContaining('1 schedule uses this saved command')]);
  await farhand('schedules delete', ['job', '--yes']);
  expect((await farhand('saved-commands delete', ['greet', '--yes'])).code).toBe(0);
});

test('Ctrl-C cancels a saved command on all machines, after its first output was printed', async () => {
  const system = await startFarhand();
  for (const name of ['web-1', 'web-2']) await system.agent({ name, tags: 'web' });
  const farhand = createLine(system);
  await farhand('saved-commands create', ['wait', '--', 'sh', '-c', 'echo began; sleep 600']);
  const running = farhand.start('saved-commands run', ['wait', '--tags', 'web']);
  await running.says(/web-1 \| began/);
  await running.says(/web-2 \| began/);
  running.child.kill('SIGINT');
  expect((await running.ended).code).toBe(130);
  const { items } = await system.client.commands.list();
  expect(items.map(({ status }) => status)).toEqual(['cancelled', 'cancelled']);
});

test('a saved command that fails on its only machine exits with 1, and says why on standard error', async () => {
  const system = await startFarhand();
  await system.agent({ name: 'web-1' });
  const farhand = createLine(system);
  await farhand('saved-commands create', ['fail', '--', 'sh', '-c', 'echo said; exit 3']);
  const failed = await farhand('saved-commands run', ['fail', '--machine', 'web-1']);
  expect(failed).toMatchObject({ code: 1, out: 'said\n', err: '  web-1: exit code 3\n' });
});

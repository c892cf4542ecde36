// Output of farhand that cannot be written, because the disk is full or the reader has closed the pipe.
import { closeSync, openSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { createLine } from '../cli-fixture.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';

async function startScene() {
  const system = await startFarhand();
  await system.agent({ name: 'web-1' });
  const folder = temporaryFolder('there');
  writeFileSync(join(folder, 'large'), Buffer.alloc(3_000_000, 'farhand '));
  return { system, farhand: createLine(system), folder };
}

/** Opens a file for a child process. Closes it at the end of the test. */
function opened(path: string): number {
  const file = openSync(path, 'w');
  onTestFinished(() => closeSync(file));
  return file;
}

test('a full disk under standard output is a failure with a message', async () => {
  const { farhand, folder } = await startScene();
  const stdout = opened('/dev/full');
  const answers = await Promise.all([
    farhand('files cat', [`web-1:${folder}/large`], { stdout }),
    farhand('files get', [`web-1:${folder}`, '-'], { stdout }),
    farhand('exec', ['web-1', '--', 'echo one'], { stdout }),
    farhand('machines list', [], { stdout }),
  ]);
  for (const { code, err } of answers)
    expect([code, err]).toEqual([1, 'farhand: standard output: ENOSPC: no space left on device, write\n']);
});

test.each([
  [
    'auth create-key',
    ['--scopes', 'machines:read'],
    /^farhand: the key is valid, but .* auth revoke-key \S+$/m,
  ],
  ['auth create-key', ['-o', 'json'], /^farhand: the key is valid, but .* auth revoke-key \S+$/m],
  ['join-tokens create', [], /^farhand: the token is valid, but .* revoke \S+$/m],
])('%s %j names the secret that it could not print on a full disk', async (verb, args, pattern) => {
  const { farhand } = await startScene();
  const { code, err } = await farhand(verb, args, { stdout: opened('/dev/full') });
  expect([code, err]).toEqual([1, expect.stringMatching(pattern)]);
  const [, revoke = '', id = ''] = /run farhand ([\w -]+) (\S+)$/m.exec(err) ?? [];
  expect((await farhand(revoke, [id, '--yes'])).code).toBe(0);
});

test('output that exceeds the limit of a file’s size is a failure', async () => {
  const { farhand, folder } = await startScene();
  const file = join(folder, 'out');
  writeFileSync(join(folder, 'small'), Buffer.alloc(30_000, 'x'));
  const { code, err } = await farhand('files cat', [`web-1:${folder}/small`], {
    stdout: opened(file),
    // The limit applies to every file that the process writes. With this path Node cannot write compiled code to a
    // cache.
    env: { XDG_CACHE_HOME: '/nonexistent' },
    through: ['sh', '-c', 'ulimit -f 4; exec "$@"', 'sh'],
  });
  expect([code, err]).toEqual([1, expect.stringMatching(/^farhand: standard output: EFBIG.*\n$/)]);
  expect(statSync(file).size).toBeLessThan(30_000);
});

test.each([
  ['files cat', (folder: string) => [`web-1:${folder}/large`]],
  ['files get', (folder: string) => [`web-1:${folder}/large`, '-']],
])('%s ends quietly with 141 when its reader leaves', async (verb, args) => {
  const { farhand, folder } = await startScene();
  const running = farhand.start(verb, args(folder));
  running.child.stdout?.once('data', () => running.child.stdout?.destroy());
  const { code, err } = await running.ended;
  expect([code, err]).toEqual([141, '']);
});

test('events and commands output also end quietly with 141 when their reader leaves', async () => {
  const { system, farhand } = await startScene();
  const { id } = await system.client.commands.create({
    machine_id: (await system.client.machines.list()).items[0]?.id ?? '',
    command: 'head -c 300000 /dev/zero',
  });
  const gone = (verb: string, args: string[]) => {
    const running = farhand.start(verb, args);
    running.child.stdout?.destroy();
    return running.ended;
  };
  const answers = await Promise.all([gone('events', ['-o', 'json']), gone('commands output', [id])]);
  for (const { code, err } of answers) expect([code, err]).toEqual([141, '']);
});

test.each(['stdout', 'stderr'] as const)(
  'exec ends and cancels its command when its %s has no reader any more',
  async (name) => {
    const { system, farhand } = await startScene();
    const both = 'while sleep 0.02; do echo line; echo line >&2; done';
    const running = farhand.start('exec', ['web-1', '--', both]);
    await running.says(/line/);
    running.child[name]?.destroy();
    expect((await running.ended).code).toBe(141);
    await waitFor(async () =>
      expect((await system.client.commands.list({ limit: 1 })).items[0]?.status).toBe('cancelled'),
    );
  },
);

test('much output of several machines makes no warning; input for them is text of at most 48 KiB', async () => {
  const { system, farhand } = await startScene();
  await Promise.all(Array.from({ length: 11 }, (_, at) => system.agent({ name: `db-${at}`, tags: 'db' })));
  const running = farhand.start('exec', ['--tag', 'db', '--', 'head -c 200000 /dev/zero | tr "\\0" "\\n"']);
  running.child.stdout?.pause();
  await new Promise((resolve) => running.child.stdout?.once('readable', resolve));
  running.child.stdout?.resume();
  const { code, err } = await running.ended;
  expect([code, err]).toEqual([0, '11 machines: 11 completed\n']);
  const [binary, long] = await Promise.all([
    farhand('exec', ['web-1', 'db-1', '-i', '--', 'cat'], { input: Buffer.from([0xff, 0x0a]) }),
    farhand('exec', ['web-1', 'db-1', '-i', '--', 'cat'], { input: 'x'.repeat(60_000) }),
  ]);
  expect([binary.code, binary.err]).toEqual([2, expect.stringContaining('is not UTF-8; ')]);
  expect([long.code, long.err]).toEqual([2, expect.stringContaining('more than 49152 bytes; ')]);
});

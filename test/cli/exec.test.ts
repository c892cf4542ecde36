// farhand exec: bytes, input, signals, exit codes, broken connections, many machines.
import { createHash, randomBytes } from 'node:crypto';
import { existsSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import { createLine } from '../cli-fixture.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { takeFirst } from '../take-first.ts';
import { startProxy } from '../tcp-proxy.ts';
import { waitFor } from '../wait-for.ts';

async function startScene() {
  const system = await startFarhand();
  const agent = await system.agent({ name: 'web-1', tags: 'web' });
  return { system, agent, farhand: createLine(system) };
}

/**
 * Starts `farhand exec` behind a proxy, and resolves when its command has printed `one`. Once the file `go` exists, the
 * command prints `two` and exits with 6.
 */
async function startThroughProxy() {
  const { system, farhand } = await startScene();
  const proxy = await startProxy(new URL(system.url).host);
  const go = join(temporaryFolder('go'), 'go');
  const command = `echo one; while ! [ -e ${go} ]; do sleep 0.05; done; echo two; exit 6`;
  const env = { FARHAND_URL: `http://${proxy.address}` };
  const running = farhand.start('exec', ['web-1', '--', command], { env });
  await running.says(/one/);
  return { system, proxy, running, go };
}

describe('farhand exec on one machine', () => {
  test('forwards every byte of output unchanged, including escape sequences, as ssh does', async () => {
    const { farhand } = await startScene();
    const { stdout } = await farhand('exec', ['web-1', '--', forgery]);
    expect(stdout.includes('\u001b[1A\rother-1 | forged')).toBe(true);
  });

  test('exits with the code of the command, or explains why there is none', async () => {
    const { farhand } = await startScene();
    const [plain, killed, late, missing, away] = await Promise.all([
      farhand('exec', ['web-1', '--', 'echo out; echo err >&2; exit 3']),
      farhand('exec', ['web-1', '--', 'kill -KILL $$']),
      farhand('exec', ['web-1', '--timeout', '200ms', '--', 'sleep 60']),
      farhand('exec', ['web-1', '--', '/no/such/program', 'x']),
      farhand('exec', ['web-2', '--', 'true']),
    ]);
    expect([plain.code, plain.out, plain.err]).toEqual([3, 'out\n', 'err\n']);
    expect([killed.code, killed.err]).toEqual([137, 'farhand: the command was killed by SIGKILL\n']);
    expect([late.code, late.err]).toEqual([124, expect.stringMatching(/^farhand: timeout/)]);
    expect(missing.code).not.toBe(0);
    expect(missing.err).toMatch(/^farhand: /);
    expect([away.code, away.err]).toEqual([1, expect.stringContaining('no machine is named web-2')]);
  });

  test('says in words why a command never ran', async () => {
    const { system, farhand } = await startScene();
    const away = await system.agent({ name: 'web-2', tags: 'away' });
    await away.close();
    await waitFor(async () =>
      expect((await system.client.machines.get({ machine_id: away.machineId })).status).toBe('offline'),
    );
    const [late, batch] = await Promise.all([
      farhand('exec', ['web-2', '--queue-for', '1ms', '--', 'true']),
      farhand('exec', ['--tags', 'away', '--', 'true']),
    ]);
    expect([late.code, late.err]).toEqual([
      1,
      'farhand: expired: the machine was offline or busy for too long (queue_expired); --queue-for sets how long the command waits\n',
    ]);
    expect([batch.code, batch.err]).toEqual([
      1,
      expect.stringContaining(
        '  web-2: expired: the machine is offline (machine_offline); --queue-for waits',
      ),
    ]);
  });

  test('runs one word as a shell command, several words as a program and its arguments', async () => {
    const { farhand } = await startScene();
    const folder = temporaryFolder('cwd');
    const [line, program, about] = await Promise.all([
      farhand('exec', ['web-1', '--', 'echo $((6 * 7))']),
      farhand('exec', ['web-1', '--', 'printf', '%s|', '$((6 * 7))', '--detach', 'a b']),
      farhand('exec', ['web-1', '--cwd', folder, '--env', 'A=x=y', '--', 'echo $A; pwd']),
    ]);
    expect([line.out, program.out]).toEqual(['42\n', '$((6 * 7))|--detach|a b|']);
    expect(about.out).toBe(`x=y\n${folder}\n`);
  });

  test('removes the values of --env from its own command line', async () => {
    const { farhand } = await startScene();
    const all = 'cat /proc/[0-9]*/cmdline | tr "\\0" " "';
    const look = `case $(${all}) in *"$TOKEN"*) echo seen;; *) echo unseen;; esac`;
    const token = randomBytes(16).toString('hex');
    const { out } = await farhand('exec', ['web-1', '--env', `TOKEN=${token}`, '--', look]);
    expect(out).toBe('unseen\n');
  });

  test('forwards every byte of input and output', async () => {
    const { farhand } = await startScene();
    const bytes = Buffer.alloc(1_500_000, Buffer.from(Array.from({ length: 251 }, (_, n) => n + 3)));
    const { code, stdout, err } = await farhand('exec', ['web-1', '--', 'cat'], { input: bytes });
    expect([code, err]).toEqual([0, '']);
    const sum = (of: Buffer): string => createHash('sha256').update(of).digest('hex');
    expect([stdout.length, sum(stdout)]).toEqual([bytes.length, sum(bytes)]);
  });

  test('ends if the command ignores its input, and if the output has no reader any more', async () => {
    const { system, farhand } = await startScene();
    const { code } = await farhand('exec', ['web-1', '--', 'exit 5'], { input: Buffer.alloc(300_000) });
    expect(code).toBe(5);
    const running = farhand.start('exec', ['web-1', '--', 'while sleep 0.02; do echo line; done']);
    await running.says(/line/);
    running.child.stdout?.destroy();
    expect((await running.ended).code).toBe(141);
    await waitFor(async () => {
      const { items } = await system.client.commands.list({ limit: 1 });
      expect(items[0]?.status).toBe('cancelled');
    });
  });

  test('cancels the whole process tree on Ctrl-C, and ends at once on the next', async () => {
    const { system, farhand } = await startScene();
    const running = farhand.start('exec', ['web-1', '--', 'echo on; sleep 300']);
    await running.says(/on/);
    running.child.kill('SIGINT');
    expect((await running.ended).code).toBe(130);
    expect((await system.client.commands.list({ limit: 1 })).items[0]?.status).toBe('cancelled');
    const stubborn = farhand.start('exec', [
      'web-1',
      '--',
      'trap "" TERM; echo on; while :; do sleep 0.1; done',
    ]);
    await stubborn.says(/on/);
    stubborn.child.kill('SIGTERM');
    await waitFor(() => {
      stubborn.child.kill('SIGTERM');
      expect(stubborn.child.exitCode).toBe(143);
    });
  });

  test('on Ctrl-C cancels a command or batch whose id has not arrived yet', async () => {
    const { system, agent, farhand } = await startScene();
    const more = await system.agent({ name: 'web-2' });
    for (const machines of [[agent.machineId], [agent.machineId, more.machineId]]) {
      // The answer takes longer than the start of the command.
      const proxy = await startProxy(new URL(system.url).host, { delayMs: 1_500 });
      const env = { FARHAND_URL: `http://${proxy.address}` };
      const events = await system.client.events.stream({ types: 'command.started' });
      const running = farhand.start('exec', [...machines, '--', 'sleep 600'], { env });
      await takeFirst(1, events);
      running.child.kill('SIGINT');
      expect((await running.ended).code).toBe(130);
      const { items } = await system.client.commands.list({ limit: machines.length });
      expect(new Set(items.map(({ status }) => status))).toEqual(new Set(['cancelled']));
    }
  });

  test.each(['stall', 'forbid'] as const)(
    'ends some seconds after a signal if the broker cannot be reached any more (%s)',
    async (how) => {
      const { proxy, running } = await startThroughProxy();
      proxy[how]();
      running.child.kill('SIGTERM');
      const { code, err } = await running.ended;
      expect([code, err]).toEqual([143, expect.stringContaining('the command may go on')]);
    },
  );

  test('ends the input of the command if standard input cannot be read', async () => {
    const { farhand } = await startScene();
    // A file that is open only for writing.
    const through = ['sh', '-c', 'exec "$@" 0> written', 'sh'];
    const { code, out, err } = await farhand('exec', ['web-1', '--', 'cat; echo over'], { through });
    expect([code, out]).toEqual([0, 'over\n']);
    expect(err).toContain('standard input could not be read');
  });

  test('continues at the same byte after its connection broke', async () => {
    const { proxy, running, go } = await startThroughProxy();
    proxy.cut();
    writeFileSync(go, '');
    const { code, out, err } = await running.ended;
    expect([code, out, err]).toEqual([6, 'one\ntwo\n', '']);
    await proxy.close();
  });

  test('says that its broker is away, and that it is back, and goes on at the same byte', async () => {
    const { system, proxy, running, go } = await startThroughProxy();
    proxy.forbid();
    await running.says(/trying again/);
    proxy.allow();
    await running.says(/connected to the broker again/);
    writeFileSync(go, '');
    const { code, out, err } = await running.ended;
    const { id } = (await system.client.commands.list({ limit: 1 })).items[0] ?? {};
    expect([code, out]).toEqual([6, 'one\ntwo\n']);
    expect(err.split('\n')).toEqual([
      `farhand: the connection to the broker broke: trying again; command ${id} goes on (farhand commands output ${id} --follow)`,
      'farhand: connected to the broker again',
      '',
    ]);
    await proxy.close();
  });

  test('says that the machine of a silent command is offline, and that it is online again', async () => {
    const { system, agent, farhand } = await startScene();
    await agent.close();
    const go = join(temporaryFolder('go'), 'go');
    const command = `while ! [ -e ${go} ]; do sleep 0.05; done; exit 6`;
    const running = farhand.start('exec', ['web-1', '--queue-for', '10m', '--', command]);
    await running.says(/web-1 is offline/);
    await system.agent({ dataDir: agent.dataDir });
    await running.says(/web-1 is online again/);
    writeFileSync(go, '');
    const { code, out, err } = await running.ended;
    expect([code, out, err]).toEqual([
      6,
      '',
      'farhand: web-1 is offline: waiting until it is back and reports on the command; Ctrl-C cancels the command\nfarhand: web-1 is online again\n',
    ]);
  });

  test('says that the command was sent if the key may not read its output', async () => {
    const { system, agent } = await startScene();
    const folder = temporaryFolder('sent');
    const farhand = createLine({ ...system, key: (await system.keyed(['commands:execute'])).key });
    const one = await farhand('exec', [agent.machineId, '--', `echo >> ${folder}/one`]);
    const { id } = (await system.client.commands.list({ limit: 1 })).items[0] ?? {};
    const why =
      'was sent, but cannot be followed: reading its output needs the scope commands:read, which this key lacks (forbidden); do not send it again: farhand';
    expect([one.code, one.out, one.err]).toEqual([
      1,
      '',
      `farhand: command ${id} ${why} commands output ${id} --follow prints its output\n`,
    ]);
    const many = await farhand('exec', ['--tags', 'web', '--', `echo >> ${folder}/many`]);
    expect([many.code, many.out, many.err]).toEqual([
      1,
      '',
      expect.stringMatching(
        `^farhand: batch batch_\\w+ ${why.replace(/[()]/g, '.')} batches get batch_\\w+ prints its results\n$`,
      ),
    ]);
    await waitFor(() => {
      for (const name of ['one', 'many']) expect(readFileSync(join(folder, name), 'utf8')).toBe('\n');
    });
  });

  test('prints lines of JSON for programs, and only the id with --detach', async () => {
    const { system, farhand } = await startScene();
    const { out } = await farhand('exec', [
      'web-1',
      '-o',
      'json',
      '--',
      'printf "\\377"; echo text >&2; exit 2',
    ]);
    const lines = out
      .trim()
      .split('\n')
      .map((line) => JSON.parse(line));
    expect(lines).toContainEqual(
      expect.objectContaining({ stream: 'stdout', data: '/w==', encoding: 'base64' }),
    );
    expect(lines).toContainEqual(
      expect.objectContaining({ stream: 'stderr', data: 'text\n', encoding: 'utf-8' }),
    );
    expect(lines.at(-1)).toMatchObject({ status: 'failed', exit_code: 2 });
    const folder = temporaryFolder('detached');
    const detached = await farhand('exec', ['web-1', '--detach', '--', `sleep 0.2; touch ${folder}/done`]);
    const command_id = detached.out.trim();
    expect((await system.client.commands.get({ command_id })).status).toMatch(/queued|running|completed/);
    await waitFor(() => expect(existsSync(join(folder, 'done'))).toBe(true));
  });
});

test('farhand says how long it waits for the rate limit of its key', async () => {
  const system = await startFarhand({ flags: ['--rate-limit', '3'] });
  const { key } = await system.keyed(['machines:read']);
  const ask = async () => (await system.call('GET', '/machines', { key })).status;
  while ((await ask()) !== 429);
  const running = createLine({ ...system, key }).start('machines list');
  await running.says(/^farhand: rate limit: waiting \d+ s$/m);
  running.child.kill();
  expect((await running.ended).out).toBe('');
});

test('farhand exec loads few modules before its first request: no schemas, no second HTTP client, no other verb', async () => {
  const { farhand } = await startScene();
  // Counts loaded modules instead of time, so that the test does not fail on a busy machine.
  const hook = `import { registerHooks } from 'node:module';
    const load = (url, context, next) => { process.stderr.write('loads ' + url + '\\n'); return next(url, context); };
    registerHooks({ load });`;
  const env = { NODE_OPTIONS: `--import=data:text/javascript,${encodeURIComponent(hook)}` };
  const { code, err } = await farhand('exec', ['web-1', '--', 'true'], { env });
  const loaded = [...err.matchAll(/^loads file:\/\/(.*)$/gm)].map(([, file = '']) => statSync(file).size);
  expect([code, loaded.length > 3]).toEqual([0, true]);
  expect(loaded.reduce((sum, bytes) => sum + bytes, 0)).toBeLessThan(168_000);
});

/**
 * Output that imitates a line of another machine: by moving the cursor, by carriage returns, and by C1 control
 * characters.
 */
const forgery = String.raw`printf 'good\tday\r\n\033[1A\rother-1 | forged\rother-1 | forged\n\033]0;title\007\302\2332J\342\200\256turned\n'`;

describe('farhand exec on several machines', () => {
  test('prints no control character (ESC, carriage return, C1, bidi) that could imitate a line of another machine', async () => {
    const { system, farhand } = await startScene();
    await system.agent({ name: 'other-1', tags: 'other' });
    const { out, err } = await farhand('exec', ['web-1', 'other-1', '--', `${forgery}; ${forgery} >&2`]);
    const lines = (name: string) => [
      `${name} | good\tday`,
      `${name} | \ufffdother-1 | forged\ufffdother-1 | forged`,
      `${name} | \ufffdturned`,
    ];
    const expected = [...lines('web-1  '), ...lines('other-1')];
    expect(out.split('\n').filter(Boolean).toSorted()).toEqual(expected.toSorted());
    expect(
      err
        .split('\n')
        .filter((line) => line.includes(' | '))
        .toSorted(),
    ).toEqual(expected.toSorted());
  });

  test('escapes control characters in JSON without changing its value', async () => {
    const { farhand } = await startScene();
    const text = 'a\u009b2J\u007f\u2028\u202eb\u2066\n';
    const { out } = await farhand('exec', ['web-1', '-o', 'json', '--', `printf '${text.trimEnd()}\\n'`]);
    expect(out).not.toMatch(
      // biome-ignore lint/suspicious/noControlCharactersInRegex: the test expects no such characters
      /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069]/,
    );
    expect(JSON.parse(out.split('\n')[0] ?? '')).toMatchObject({ data: text });
  });

  test('prefixes each line with its machine, prints a summary, and exits with 1 if one failed', async () => {
    const { system, farhand } = await startScene();
    const db = await system.agent({ name: 'database-1', tags: 'web' });
    await system.agent({ name: 'other-1', tags: 'other' });
    const [mixed, good, none] = await Promise.all([
      farhand('exec', [
        '--tag',
        'web',
        '--',
        `echo "$FARHAND_MACHINE_ID"; pwd >&2; printf half; ls ${db.dataDir}/nothing-here 2>/dev/null || exit 3`,
      ]),
      farhand('exec', ['web-1', 'other-1', '-i', '--', 'cat'], { input: 'to both\n' }),
      farhand('exec', ['--tag', 'nosuch', '--', 'true']),
    ]);
    expect(mixed.code).toBe(1);
    expect(mixed.out).toMatch(/^web-1 {6}\| half$/m);
    expect(mixed.out).toMatch(/^database-1 \| half$/m);
    expect(mixed.err).toMatch(/2 machines: 2 failed\n(.*\n)*? {2}web-1: exit code 3/);
    expect([good.code, good.out.split('\n').sort()]).toEqual([
      0,
      ['', 'other-1 | to both', 'web-1   | to both'],
    ]);
    const unsent = await farhand('exec', ['web-1', 'other-1', '--', 'cat'], { input: 'to both\n' });
    expect([unsent.code, unsent.out, unsent.err]).toEqual([
      0,
      '',
      expect.stringContaining('add -i to send it'),
    ]);
    expect([none.code, none.err]).toEqual([
      1,
      expect.stringMatching(/^farhand: .*no machine that this key may use has all of the tags nosuch .*\n$/),
    ]);
  });

  test('prints the last bytes of an output even if they are half a character', async () => {
    const { system, farhand } = await startScene();
    await system.agent({ name: 'web-2', tags: 'web' });
    const { out } = await farhand('exec', ['--tag', 'web', '--', String.raw`printf 'caf\303'`]);
    expect(out.split('\n').toSorted()).toEqual(['', 'web-1 | caf\ufffd', 'web-2 | caf\ufffd']);
  });

  test('starts the command on no further machine after --max-failures', async () => {
    const { system, farhand } = await startScene();
    await system.agent({ name: 'web-2', tags: 'web' });
    const flags = ['--concurrency', '1', '--max-failures', '0', '-o', 'json'];
    const { code, out } = await farhand('exec', ['--tag', 'web', ...flags, '--', 'exit 1']);
    const ends = out
      .trim()
      .split('\n')
      .map((line) => String(JSON.parse(line).status));
    expect([code, ends.toSorted((a, b) => a.localeCompare(b))]).toEqual([1, ['expired', 'failed']]);
  });
});

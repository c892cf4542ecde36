// Commands over REST, from HTTP to real processes and back.
import { execFileSync } from 'node:child_process';
import { existsSync, readFileSync, unlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { bench, reporting } from './commands-fixture.ts';
import { connectScripted, joinScripted, linkScripted, scriptedMachine } from './scripted-agent.ts';
import { startFarhand, startWithAgent, temporaryFolder } from './start-farhand.ts';

async function onMachine(flags: string[] = []) {
  const { system, agent, machine_id } = await startWithAgent({ flags });
  const run = (body: object) => system.call('POST', '/commands', { body: { machine_id, ...body } });
  return { system, machine_id, run, close: agent.close };
}

/** True if the process whose pid is in a file is running. A zombie counts as ended. */
function alive(pidFile: string): boolean {
  const stat = `/proc/${readFileSync(pidFile, 'utf8').trim()}/stat`;
  return existsSync(stat) && !readFileSync(stat, 'utf8').includes(') Z ');
}

test('a command that cannot start is failed with a clear reason', async () => {
  const { run } = await onMachine();
  for (const [body, reason] of [
    [{ command: 'true', cwd: '/no/such/folder' }, /working directory/],
    [{ command: '/no/such/program', args: [] }, /\/no\/such\/program/],
    [{ command: 'true', user: 'no-such-user' }, /no-such-user/],
  ] as const) {
    const { status, body: answer } = await run(body);
    expect(status).toBe(201);
    expect(answer.data).toMatchObject({ status: 'failed', exit_code: null, started_at: null });
    expect(answer.data.reason).toMatch(reason);
  }
});

test.each([
  ['no command', {}],
  ['an empty command', { command: '' }],
  ['NUL in the command', { command: 'a\0b' }],
  ['a wait over 50 s', { command: 'true', wait: 50_001 }],
  ['a bad variable name', { command: 'true', env: { 'A-B': 'x' } }],
  ['an unknown field', { command: 'true', shell: 'bash' }],
])('%s is validation_failed', async (_what, body) => {
  const { run, system } = await onMachine();
  const answer = await run(body);
  expect([answer.status, answer.body.error.code]).toEqual([422, 'validation_failed']);
  expect((await system.client.commands.list()).total).toBe(0);
});

test('commands for an offline or a locked machine are refused before anything is stored', async () => {
  const { system, run, close } = await onMachine(['--allow', 'metrics,exec']);
  const locked = await run({ command: 'id', user: 'root' });
  expect([locked.status, locked.body.error.code]).toEqual([403, 'permission_denied']);
  await close();
  const offline = await run({ command: 'true' });
  expect([offline.status, offline.body.error.code]).toEqual([503, 'machine_offline']);
  expect((await system.client.commands.list()).total).toBe(0);
});

test('a machine with 64 open commands lets one more wait, and still answers file requests', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const machine_id = agent.identity.machineId;
  const run = () => system.call('POST', '/commands', { body: { machine_id, command: 'sleep 600', wait: 0 } });
  for (let n = 0; n < 64; n += 1) expect((await run()).status).toBe(201);
  const waiting = await run();
  expect([waiting.status, waiting.body.data.status]).toEqual([201, 'queued']);
  const reading = system.call('GET', `/machines/${machine_id}/files`);
  agent.answerWith(await agent.nextCallOf('ListFiles'), { head: { path: Buffer.from('/'), total: 0 } });
  expect((await reading).status).toBe(200);
});

test('a list has only the end of each output, marked as truncated', async () => {
  const { run, system } = await onMachine();
  const { body } = await run({ command: 'seq 1 5000' });
  const { items } = await system.client.commands.list();
  expect(items[0]).toMatchObject({
    id: body.data.id,
    stdout_truncated: true,
    stdout_bytes: body.data.stdout_bytes,
  });
  expect(items[0]?.stdout).toBe(body.data.stdout.slice(-4096));
  expect(body.data.stdout_truncated).toBe(false);
});

const mayMount = process.getuid?.() === 0;

test.skipIf(!mayMount)(
  'with a full disk at the broker, the end of a command is stored once there is space (needs root, to mount)',
  async () => {
    const dataDir = temporaryFolder('full');
    execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', dataDir]);
    onTestFinished(() => void execFileSync('umount', ['-l', dataDir]));
    const system = await startFarhand({ dataDir });
    const agent = await scriptedMachine(system);
    const { body } = await system.call('POST', '/commands', {
      body: { machine_id: agent.identity.machineId, command: 'true', wait: 0 },
    });
    const stream = agent.answer((await agent.next('call')).call_id);
    const filler = join(dataDir, 'filler');
    expect(() => writeFileSync(filler, Buffer.alloc(8 * 1024 * 1024))).toThrow(/ENOSPC/);
    // Writes until even the space reserved for the write-ahead log is used.
    for (let n = 0, full = false; n < 2000 && !full; n += 1) {
      full = (await system.call('POST', '/join-tokens', { body: {} })).status === 503;
    }
    stream.write({ error: { code: 'unavailable', message: 'too many', details: '{}' } });
    stream.end();
    const refused = await system.call('PATCH', `/machines/${agent.identity.machineId}`, {
      body: { name: 'x' },
    });
    expect([refused.status, refused.body.error.code]).toEqual([503, 'unavailable']);
    unlinkSync(filler);
    await expect
      .poll(async () => (await system.client.commands.get({ command_id: body.data.id })).status)
      .toBe('failed');
  },
);

test('the record in the answer of a request that waits is complete', async () => {
  const { run, machine_id, system } = await onMachine();
  const { status, body } = await run({
    command: 'echo "$GREETING"; cat; pwd; echo oops >&2; exit 3',
    env: { GREETING: 'hällo' },
    stdin: 'from stdin\n',
    cwd: '/tmp',
  });
  expect(status).toBe(201);
  expect(body.data).toEqual({
    id: expect.stringMatching(/^cmd_[0-9A-Za-z]{22}$/),
    machine_id,
    command: 'echo "$GREETING"; cat; pwd; echo oops >&2; exit 3',
    args: null,
    cwd: '/tmp',
    user: null,
    status: 'failed',
    exit_code: 3,
    signal: null,
    stdout: 'hällo\nfrom stdin\n/tmp\n',
    stderr: 'oops\n',
    stdout_bytes: 23,
    stderr_bytes: 5,
    stdout_truncated: false,
    stderr_truncated: false,
    stdout_start: 0,
    stderr_start: 0,
    queued_until: null,
    duration: expect.any(Number),
    created_at: expect.any(String),
    started_at: expect.any(String),
    finished_at: expect.any(String),
    reason: null,
    schedule_id: null,
    batch_id: null,
    requested_by: expect.stringMatching(/^key_/),
  });
  expect(await system.client.commands.get({ command_id: body.data.id })).toEqual(body.data);
  const events = await system.client.events.list({ limit: 100 });
  const types = events.items.filter(({ data }) => data.command_id === body.data.id).map(({ type }) => type);
  expect(types).toEqual(['command.failed', 'command.started']);
});

test('with args, `command` is the program, and no shell is used', async () => {
  const { run } = await onMachine();
  const { body } = await run({ command: 'printf', args: ['%s|', '$HOME', '; id', '-n'] });
  expect(body.data).toMatchObject({ status: 'completed', exit_code: 0, stdout: '$HOME|; id|-n|' });
});

test('a command killed by a signal reports 128 + n and the signal', async () => {
  const { run } = await onMachine();
  const { body } = await run({ command: 'kill -KILL $$' });
  expect(body.data).toMatchObject({ status: 'failed', exit_code: 137, signal: 'SIGKILL' });
});

test('at its timeout the whole process tree is killed, including children with setsid and daemonised grandchildren', async () => {
  const { run } = await onMachine();
  const folder = temporaryFolder('tree');
  const [child, grandchild] = [join(folder, 'child'), join(folder, 'grandchild')];
  const { body } = await run({
    command: `setsid sh -c 'echo $$ > ${child}; exec sleep 600' & (setsid sh -c 'echo $$ > ${grandchild}; exec sleep 600' &) ; wait`,
    timeout: 700,
  });
  expect(body.data).toMatchObject({ status: 'timeout' });
  expect([alive(child), alive(grandchild)]).toEqual([false, false]);
});

test('with wait: 0 the answer comes at once, and DELETE ends the command once', async () => {
  const { run, system } = await onMachine();
  const started = await run({ command: 'sleep 600', wait: 0 });
  expect(['queued', 'running']).toContain(started.body.data.status);
  const cancelled = await system.call('DELETE', `/commands/${started.body.data.id}`);
  expect(cancelled.body.data).toMatchObject({ status: 'cancelled', id: started.body.data.id });
  const again = await system.call('DELETE', `/commands/${started.body.data.id}`);
  expect(again.body.data).toEqual(cancelled.body.data);
});

test('the record has the last MiB of the output and reports how much is missing', async () => {
  const { run } = await onMachine();
  const { body } = await run({
    command: 'head -c 3000000 /dev/zero | tr "\\0" a; printf end; printf "\\377\\0" >&2',
  });
  expect(body.data).toMatchObject({ stdout_bytes: 3_000_003, stdout_truncated: true, stderr: '\ufffd\0' });
  expect(body.data.stdout).toHaveLength(1024 * 1024);
  expect(body.data.stdout.endsWith('aend')).toBe(true);
});

test('a key that is revoked while it waits gets no answer, and the command goes on', async () => {
  const { system, machine_id } = await onMachine();
  const { key } = await system.keyed(['commands:execute', 'commands:read']);
  const go = join(temporaryFolder('revoked'), 'go');
  const body = { machine_id, command: `while [ ! -e ${go} ]; do sleep 0.02; done; echo secret` };
  const waiting = system.call('POST', '/commands', { key, body });
  await expect.poll(async () => (await system.client.commands.list({ status: 'running' })).total).toBe(1);
  const { items } = await system.client.keys.list();
  await system.client.keys.remove({ key_id: items.find(({ name }) => name === 'limited')?.id ?? '' });
  const refused = await waiting;
  expect([refused.status, refused.body.error.code]).toEqual([401, 'unauthorized']);
  writeFileSync(go, '');
  await expect.poll(async () => (await system.client.commands.list({ status: 'completed' })).total).toBe(1);
});

test('an empty Idempotency-Key is refused, because a repeat would run the command again', async () => {
  const { system, machine_id } = await onMachine();
  const body = { machine_id, command: 'true' };
  const answer = await system.call('POST', '/commands', { body, headers: { 'Idempotency-Key': '' } });
  expect([answer.status, answer.body.error.code]).toEqual([400, 'invalid_request']);
  expect((await system.client.commands.list({})).total).toBe(0);
});

test('a repeat with the same idempotency key after a lost wait gets the current record', async () => {
  const { run, system, machine_id } = await onMachine();
  const go = join(temporaryFolder('again'), 'go');
  const body = { machine_id, command: `while [ ! -e ${go} ]; do sleep 0.02; done; echo done` };
  const ask = (signal?: AbortSignal) =>
    system.call('POST', '/commands', {
      body,
      headers: { 'Idempotency-Key': 'once' },
      ...(signal && { signal }),
    });
  const leaving = new AbortController();
  const left = ask(leaving.signal);
  await expect.poll(async () => (await system.client.commands.list({ status: 'running' })).total).toBe(1);
  leaving.abort();
  await expect(left).rejects.toThrow();
  writeFileSync(go, '');
  await expect.poll(async () => (await system.client.commands.list({ status: 'completed' })).total).toBe(1);
  expect((await ask()).body.data).toMatchObject({ status: 'completed', stdout: 'done\n' });
  expect((await run({ command: 'true' })).status).toBe(201);
});

test('a link that is cut in the middle loses no output and runs nothing twice', async () => {
  const { system, proxy, agent } = await bench();
  const folder = temporaryFolder('cut');
  const go = join(folder, 'go');
  const { body } = await system.call('POST', '/commands', {
    body: {
      machine_id: agent.machineId,
      command: `echo ran >> ${folder}/ran; seq 1 20000; while [ ! -e ${go} ]; do sleep 0.05; done; seq 20001 40000`,
      wait: 0,
    },
  });
  await expect
    .poll(async () => (await system.client.commands.get({ command_id: body.data.id })).stdout_bytes)
    .toBeGreaterThan(1000);
  const back = agent.linked(true);
  proxy.cut();
  await agent.linked(false);
  writeFileSync(go, '');
  await back;
  await expect
    .poll(async () => (await system.client.commands.get({ command_id: body.data.id })).status)
    .toBe('completed');
  const { stdout } = await system.client.commands.get({ command_id: body.data.id });
  expect(stdout).toBe(Array.from({ length: 40_000 }, (_, n) => `${n + 1}\n`).join(''));
  expect(readFileSync(join(folder, 'ran'), 'utf8')).toBe('ran\n');
});

test('an agent that cannot open a second connection sends a large output over its first', async () => {
  const { system, proxy, machine_id } = await bench();
  proxy.refuse();
  const { body } = await system.call('POST', '/commands', {
    body: { machine_id, command: 'seq 1 100000; sleep 0.1' },
  });
  expect(body.data).toMatchObject({ status: 'completed', stdout_bytes: 588_895 });
});

test('a restarted broker follows the commands that still run', async () => {
  const { system, proxy, agent } = await bench();
  const go = join(temporaryFolder('restart'), 'go');
  const { body } = await system.call('POST', '/commands', {
    body: {
      machine_id: agent.machineId,
      command: `echo a; while [ ! -e ${go} ]; do sleep 0.05; done; echo b`,
      wait: 0,
    },
  });
  await expect
    .poll(async () => (await system.client.commands.get({ command_id: body.data.id })).stdout)
    .toBe('a\n');
  proxy.forbid();
  await system.broker.close();
  const again = await startFarhand({ dataDir: system.dataDir, flags: ['--grpc', system.grpc] });
  const back = agent.linked(true);
  proxy.allow();
  await back;
  writeFileSync(go, '');
  await expect
    .poll(async () => (await again.client.commands.get({ command_id: body.data.id })).status)
    .toBe('completed');
  expect(await again.client.commands.get({ command_id: body.data.id })).toMatchObject({ stdout: 'a\nb\n' });
});

test('a stored command fails if its agent refuses it, and the answer is never a 5xx', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const answer = system.call('POST', '/commands', {
    body: { machine_id: agent.identity.machineId, command: 'true' },
  });
  const stream = agent.answer((await agent.next('call')).call_id);
  stream.write({ error: { code: 'unavailable', message: 'too many', details: '{}' } });
  stream.end();
  expect(await answer).toMatchObject({
    status: 201,
    body: { data: { status: 'failed', reason: 'unavailable: too many' } },
  });
});

test('a command that the agent does not know is expired, or lost if the agent has a new journal', async () => {
  const system = await startFarhand();
  for (const [journal_id, status, reason] of [
    ['journal', 'expired', 'unknown_id'],
    ['another', 'lost', 'no_report'],
  ] as const) {
    const identity = await joinScripted(system);
    const first = await linkScripted(system.grpc, identity);
    const { body } = await system.call('POST', '/commands', {
      body: { machine_id: identity.machineId, command: 'true', wait: 0 },
    });
    await first.next('call');
    first.control.cancel();
    await first.ended;
    const second = await connectScripted(system.grpc, identity, { journal_id });
    const follow = await second.next('call');
    expect(second.decode(follow)).toMatchObject({ id: body.data.id, stdout_offset: 0 });
    const report = reporting(second, follow.call_id);
    report.unknown();
    report.end();
    await expect
      .poll(async () => await system.client.commands.get({ command_id: body.data.id }))
      .toMatchObject({ status, reason });
  }
});

test('a newer link of the same machine takes over an open command, which is not started again', async () => {
  const system = await startFarhand();
  const identity = await joinScripted(system);
  const first = await linkScripted(system.grpc, identity);
  const { body } = await system.call('POST', '/commands', {
    body: { machine_id: identity.machineId, command: 'true', wait: 0 },
  });
  first.answer((await first.next('call')).call_id);
  const second = await connectScripted(system.grpc, identity, { instance_id: 'second' });
  const follow = await second.next('call');
  expect([follow.method, second.decode(follow)]).toEqual([
    'FollowProcess',
    expect.objectContaining({ id: body.data.id }),
  ]);
});

test('an agent that reports twice ends a command once', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const answer = system.call('POST', '/commands', {
    body: { machine_id: agent.identity.machineId, command: 'true' },
  });
  const stream = agent.answer((await agent.next('call')).call_id);
  for (const exit_code of [0, 1]) {
    const exit = {
      outcome: 'PROCESS_OUTCOME_EXITED',
      exit_code,
      started_at_ms: 1_000,
      finished_at_ms: 2_000,
    };
    stream.write({ message: agent.encode('StartProcess', { event: { exit } }) });
  }
  const { body } = await answer;
  expect(body.data).toMatchObject({ status: 'completed', exit_code: 0 });
  const { items } = await system.client.events.list({ type: 'command.failed' });
  expect(items).toEqual([]);
});

test('removing a machine makes its open commands lost', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const { body } = await system.call('POST', '/commands', {
    body: { machine_id: agent.identity.machineId, command: 'sleep 600', wait: 0 },
  });
  await system.client.machines.remove({ machine_id: agent.identity.machineId });
  await expect
    .poll(async () => await system.client.commands.get({ command_id: body.data.id }))
    .toMatchObject({ status: 'lost', reason: 'machine_removed' });
  const { items } = await system.client.events.list({ type: 'command.failed' });
  const removed = await system.client.events.list({ type: 'machine.removed' });
  expect(items.map(({ data }) => data.machine_name)).toEqual([removed.items[0]?.data.machine_name]);
  expect(items[0]?.data.machine_name).not.toBe('');
});

test.skipIf(!mayMount)(
  'a runaway command does not fill the disk, and can be ended (needs root, to mount)',
  async () => {
    const dataDir = temporaryFolder('runaway');
    execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=24m', 'tmpfs', dataDir]);
    onTestFinished(() => void execFileSync('umount', ['-l', dataDir]));
    const system = await startFarhand({ dataDir });
    const { machineId: machine_id } = await system.agent();
    const { id: command_id } = await system.client.commands.async({ machine_id, command: 'yes' });
    await expect
      .poll(async () => (await system.client.commands.get({ command_id })).stdout_bytes)
      .toBeGreaterThan(100_000_000);
    const other = await system.client.commands.create({ machine_id, command: 'echo still here' });
    expect(other).toMatchObject({ status: 'completed', stdout: 'still here\n' });
    const ended = await system.client.commands.cancel({ command_id });
    expect(ended).toMatchObject({ status: 'cancelled', stdout_truncated: true });
  },
);

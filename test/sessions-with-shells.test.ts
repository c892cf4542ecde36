// Sessions over REST with a real program in the terminal.
import { createHash } from 'node:crypto';
import { existsSync, readFileSync, statSync } from 'node:fs';
import { join as path } from 'node:path';
import { expect, test } from 'vitest';
import { bench as benchOfCommands, soon } from './commands-fixture.ts';
import { createPort, ticketIn } from './sessions-fixture.ts';
import { type AgentOptions, startFarhand, temporaryFolder } from './start-farhand.ts';

/** A system with one real machine, connected through a proxy. */
async function bench(params: AgentOptions = {}) {
  const { system, proxy, agent, machine_id } = await benchOfCommands(params);
  const { sessions } = system.client;
  return {
    system,
    proxy,
    agent,
    open: (script: string, more: object = {}) =>
      sessions.create({ machine_id, shell: '/bin/sh', args: ['-c', script], ...more }),
    get: (session_id: string) => sessions.get({ session_id }),
    async join(session_id: string, more: { mode?: 'operator' | 'observer'; offset?: number } = {}) {
      const { stream_url } = await sessions.attach({ session_id, ...more });
      const port = createPort();
      void system.broker.sessions.redeem(ticketIn(stream_url))?.serve(port.port);
      return port;
    },
  };
}

test('a program in a terminal gets input and sizes, and its output arrives to the end', async () => {
  const { open, join } = await bench();
  const { id, status } = await open('read line; echo "got $line"; stty size; exit 4', { cols: 90, rows: 20 });
  expect(status).toBe('CONNECTED');
  const port = await join(id);
  expect(await port.note('ready')).toMatchObject({ offset: 0, cols: 90, rows: 20 });
  const observer = await join(id, { mode: 'observer' });
  await observer.note('ready');
  port.do({ size: { cols: 101, rows: 31 } });
  expect(await observer.note('size')).toMatchObject({ cols: 101, rows: 31 });
  port.type('words\r');
  const end = { why: 'ended', exit_code: 4, signal: null, reason: null };
  expect([await port.parted(), await observer.parted()]).toEqual([end, end]);
  expect(port.text()).toBe('words\r\ngot words\r\n31 101\r\n');
  expect(observer.text()).toBe(port.text());
});

test('a session with a program that cannot start is DISCONNECTED with the reason', async () => {
  const { open } = await bench();
  const session = await open('true', { cwd: '/nowhere/at/all' });
  expect(session).toMatchObject({ status: 'DISCONNECTED', exit_code: null, reason: expect.any(String) });
});

test('the owner of a machine can forbid terminals', async () => {
  const { open } = await bench({ flags: ['--allow', 'metrics,exec'] });
  await expect(open('true')).rejects.toMatchObject({ code: 'permission_denied' });
});

test('ending a session ends all of its processes, even those that try to escape', async () => {
  const { open, join, get, system, agent } = await bench();
  const { id } = await open('trap "" HUP TERM; setsid sleep 600 & sleep 600; sleep 600');
  const port = await join(id);
  await port.note('ready');
  // Counts the processes that have the id of the session in their environment.
  const left = async (): Promise<number> => {
    const command = `grep -lsz '${id}' /proc/[0-9]*/environ | wc -l`;
    return Number((await system.client.commands.create({ machine_id: agent.machineId, command })).stdout);
  };
  await soon(left).toBeGreaterThanOrEqual(3);
  const ended = await system.client.sessions.end({ session_id: id });
  expect(ended).toMatchObject({ status: 'DISCONNECTED', reason: 'ended' });
  expect(await port.parted()).toMatchObject({ why: 'ended', reason: 'ended' });
  expect(await left()).toBe(0);
  expect((await get(id)).attached_count).toBe(0);
});

test('links that are cut repeatedly leave no gap in the output of a client', async () => {
  const { open, join, get, proxy, agent } = await bench();
  const { id } = await open('stty -echo -onlcr; for n in 1 2 3 4; do read go; seq 1 50000; done');
  const port = await join(id);
  await port.note('ready');
  const all = Array.from({ length: 50_000 }, (_, n) => `${n + 1}\n`).join('');
  for (let round = 1; round <= 4; round += 1) {
    port.type('go\r');
    // Cuts the link in the middle of the output, after the input has arrived.
    await port.gets(all.length * (round - 1) + 1);
    const [off, back] = [agent.linked(false), agent.linked(true)];
    if (round < 4) {
      proxy.cut();
      await off;
      await back;
      await soon(async () => (await get(id)).status).toBe('CONNECTED');
    }
    await port.gets(all.length * round);
  }
  expect(await port.parted()).toMatchObject({ why: 'ended', exit_code: 0 });
  const digest = (text: string): string => createHash('sha256').update(text).digest('hex');
  expect([port.text().length, digest(port.text())]).toEqual([all.length * 4, digest(all.repeat(4))]);
});

test.each(['echo', '-echo'])(
  'a paste over links that stall and are cut arrives completely, with %s',
  async (echo) => {
    const { open, join, get, proxy, agent } = await bench();
    const file = path(temporaryFolder('paste'), 'file');
    const lines = Array.from({ length: 20_000 }, (_, n) => `line ${n}\n`);
    const all = lines.join('');
    const { id } = await open(`stty raw ${echo}; echo ready; cat > ${file}`);
    const port = await join(id);
    await port.gets(6);
    const rounds = 4;
    let pasted = 0;
    const paste = (part: number): void => {
      for (const end = (lines.length * part) / (2 * rounds); pasted < end; pasted += 100)
        port.type(lines.slice(pasted, pasted + 100).join(''));
    };
    for (let round = 0; round < rounds; round += 1) {
      paste(2 * round + 1);
      await soon(() => statSync(file).size).toBe(lines.slice(0, pasted).join('').length);
      const [off, back] = [agent.linked(false), agent.linked(true)];
      proxy.stall();
      const read = port.read();
      paste(2 * round + 2);
      // When the link is cut, some of the input is in transit.
      await soon(() => port.read()).toBeGreaterThan(read + 5);
      proxy.cut();
      proxy.resume();
      await off;
      await back;
      await soon(async () => (await get(id)).status).toBe('CONNECTED');
    }
    await soon(() => statSync(file).size).toBeGreaterThanOrEqual(all.length);
    expect(readFileSync(file, 'utf8') === all).toBe(true);
    expect(port.notes.filter(({ type }) => type === 'refused')).toEqual([]);
  },
);

test('a machine that reconnects too late has ended its terminal by itself', async () => {
  const { open, get, proxy, agent } = await bench();
  const marker = path(temporaryFolder('marker'), 'hung-up');
  const { id } = await open(`trap 'touch ${marker}; exit' HUP; while :; do sleep 0.05; done`, {
    grace_period: 200,
  });
  const off = agent.linked(false);
  proxy.forbid();
  await off;
  await soon(() => existsSync(marker)).toBe(true);
  await soon(async () => (await get(id)).status).toBe('DISCONNECTED');
  expect((await get(id)).reason).toBe('grace_period_over');
  const back = agent.linked(true);
  proxy.allow();
  await back;
});

test('a restarted agent has lost its terminals, and reports that', async () => {
  const { system, open, get, agent } = await bench();
  const { id } = await open('sleep 600');
  await agent.close();
  await soon(async () => (await get(id)).status).not.toBe('CONNECTED');
  await system.agent({ dataDir: agent.dataDir });
  await soon(async () => (await get(id)).status).toBe('DISCONNECTED');
  expect((await get(id)).reason).toBe('agent_restarted');
});

test('a restarted broker finds its terminals and their output unchanged', async () => {
  const { system, open, join, proxy, agent } = await bench();
  const { id } = await open('stty -echo; echo first; read go; echo second; read go');
  const before = await join(id);
  await before.gets(7);
  proxy.forbid();
  await system.broker.close();
  expect(await before.parted()).toEqual({ why: 'stopping' });
  const again = await startFarhand({ dataDir: system.dataDir, flags: ['--grpc', system.grpc] });
  const back = agent.linked(true);
  proxy.allow();
  await back;
  const get = () => again.client.sessions.get({ session_id: id });
  await soon(async () => (await get()).status).toBe('CONNECTED');
  const { stream_url } = await again.client.sessions.attach({ session_id: id });
  const port = createPort();
  void again.broker.sessions.redeem(ticketIn(stream_url))?.serve(port.port);
  port.type('go\r');
  await port.gets(15);
  expect(port.text()).toBe('first\r\nsecond\r\n');
  port.type('go\r');
  expect(await port.parted()).toMatchObject({ why: 'ended', exit_code: 0 });
});

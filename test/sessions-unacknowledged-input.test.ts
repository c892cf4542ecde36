// Terminal input and sizes that have not reached the agent when its link is lost. In some tests, the agent reports a wrong
// count of input bytes.
import { expect, onTestFinished, test, vi } from 'vitest';
import { bench as benchWithAgent, leapingClock, soon } from './commands-fixture.ts';
import { attached, begin, bench, createPort, join, keeper, ticketIn } from './sessions-fixture.ts';
import type { TestSystem } from './start-farhand.ts';

const kib = 1024;
const size = { cols: 80, rows: 24 };

/** An operator on a machine whose agent counts the input. */
async function typist() {
  const one = await bench();
  const { session_id } = await begin(one);
  const client = await join(one, session_id);
  client.line.head(0, size, { input_taken: 0 });
  let machine = one.machine;
  return {
    ...client,
    one,
    session_id,
    /** Cuts the link. Resolves when the client is attached over a new one. */
    async lostLink() {
      machine.agent.control.cancel();
      await client.status('GRACE_PERIOD');
      machine = await one.link();
      keeper(machine, await machine.next('KeepTerminal')).started();
      const line = attached(machine, await machine.next('AttachTerminal'));
      await line.open();
      return line;
    },
    refusals: () => client.notes.filter((note) => note.type === 'refused').map(({ message }) => message),
  };
}

/** Resolves when the client has received everything that the agent has sent so far. */
async function heard({ line, gets, given }: Awaited<ReturnType<typeof typist>>): Promise<void> {
  const at = given();
  line.output(at, '.');
  await gets(at + 1);
}

test.each([
  ['no longer knows the client', 2, { known: false, input_taken: 0 }],
  ['acknowledged nothing and does not know the client', 0, { known: false, input_taken: 0 }],
  ['has less input than it acknowledged', 2, { known: true, input_taken: 1 }],
])(
  'when a machine %s, the client is notified how much input may be lost, and no input is sent twice',
  async (_, received, count) => {
    const client = await typist();
    client.type('abcdef');
    await client.line.input(6);
    client.line.confirm(received);
    await heard(client);
    const again = await client.lostLink();
    again.head(1, size, count);
    const message = expect.stringContaining(`last ${6 - received} typed bytes`);
    expect(await client.note('refused')).toMatchObject({ message });
    client.type('gh');
    expect(await again.input(2)).toBe('gh');
  },
);

test('an acknowledgement of more input than was sent is refused, without effect on other clients', async () => {
  const clock = leapingClock();
  const client = await typist();
  const { machine } = client.one;
  const other = await join(client.one, client.session_id);
  other.line.head();
  client.type('abc');
  await client.line.input(3);
  client.line.confirm(4);
  for (const lie of [4, 1_000]) {
    // The broker waits before it attaches the client again.
    const asked = machine.next('AttachTerminal');
    let waits = true;
    void asked.then(() => {
      waits = false;
    });
    while (waits) {
      clock.leap(100);
      await new Promise(setImmediate);
    }
    const again = attached(machine, await asked);
    again.head(0, size, { known: true, input_taken: lie });
  }
  await machine.next('AttachTerminal');
  other.type('heard');
  expect(await other.line.input(5)).toBe('heard');
});

test('input in flight when a link was lost is sent again from the acknowledged offset, and only once', async () => {
  const client = await typist();
  client.type('abc');
  client.do({ size: { cols: 90, rows: 30 } }, { input: Buffer.from('def') });
  expect(await client.line.input(6)).toBe('abcdef');
  client.line.confirm(2);
  await heard(client);
  const again = await client.lostLink();
  client.type('gh');
  // The broker does not know yet at which offset to continue, so it sends no input.
  await client.one.system.client.sessions.get({ session_id: client.session_id });
  expect(again.has('input')).toBe(false);
  again.head(1, size, { known: true, input_taken: 4 });
  expect(await again.input(4)).toBe('efgh');
  again.confirm(8);
  const last = await client.lostLink();
  last.head(1, size, { known: true, input_taken: 8 });
  client.type('ij');
  expect(await last.input(2)).toBe('ij');
  expect(client.refusals()).toEqual([]);
});

test('an agent that never acknowledges is sent 64 KiB, and no more input is read from its client', async () => {
  const client = await typist();
  for (let n = 0; n < 4; n += 1) client.type(String(n).repeat(32 * kib));
  expect(await client.line.input(64 * kib)).toBe('0'.repeat(32 * kib) + '1'.repeat(32 * kib));
  await heard(client);
  expect([client.line.has('input'), client.read()]).toEqual([false, 3]);
  client.line.confirm(32 * kib);
  expect(await client.line.input(32 * kib)).toBe('2'.repeat(32 * kib));
});

/** Attaches a client to a new terminal on a real machine, whose program runs `each` for every line of input. */
async function attachedTo(system: TestSystem, machine_id: string, each: string) {
  const args = ['-c', `stty -echo; echo ready; while read line; do ${each}; done`];
  const { id: session_id } = await system.client.sessions.create({ machine_id, shell: '/bin/sh', args });
  const { stream_url } = await system.client.sessions.attach({ session_id });
  const port = createPort();
  void system.broker.sessions.redeem(ticketIn(stream_url))?.serve(port.port);
  await soon(() => port.text()).toContain('ready');
  return port;
}

test('a size that was sent while the link was silently lost reaches the terminal after the reconnect', async () => {
  const { system, proxy, agent, machine_id } = await benchWithAgent();
  const port = await attachedTo(system, machine_id, 'echo "$line $(stty size)"');
  const [lost, back] = [agent.linked(false), agent.linked(true)];
  proxy.stall();
  const read = port.read();
  port.do({ size: { cols: 132, rows: 50 } });
  port.type('size\r');
  await soon(() => port.read()).toBe(read + 2);
  proxy.cut();
  proxy.resume();
  await lost;
  await back;
  await soon(() => port.text()).toContain('size 50 132');
});

test('a signal that the agent may not send loses no input', async () => {
  const { system, machine_id } = await benchWithAgent();
  const port = await attachedTo(system, machine_id, 'echo "got $line"');
  // The kernel refuses a signal to a program of another user, such as sudo.
  const { kill } = process;
  const refusing = vi.spyOn(process, 'kill').mockImplementation((pid, name) => {
    if (pid < 0 && name === 'SIGINT')
      throw Object.assign(new Error('kill EPERM'), { code: 'EPERM', errno: -1 });
    return kill(pid, name);
  });
  onTestFinished(() => refusing.mockRestore());
  port.do({ signal: 'SIGINT' }, { input: Buffer.from('one\r') });
  await soon(() => port.text()).toContain('got one');
  expect(refusing).toHaveBeenCalledWith(expect.any(Number), 'SIGINT');
  expect(port.notes.filter(({ type }) => type === 'refused')).toEqual([]);
});

// Terminals over a real link: a cut link, a client that detaches, and an agent without terminals.
import { createHash } from 'node:crypto';
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { expect, test, vi } from 'vitest';
import { Presence } from '../../broker/presence/index.ts';
import type { AgentStub } from '../../shared/agent-rpcs.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { startFarhand } from '../start-farhand.ts';
import { startProxy } from '../tcp-proxy.ts';
import { waitFor } from '../wait-for.ts';

// The spy does not change the module. It records the broker's Presence, whose stubs the test uses to call machines.
vi.mock('../../broker/presence/index.ts', { spy: true });

const options = { request_id: 'req_1', lane: 'terminal', idle_ms: 0 } as const;

async function startLinked(through?: (grpc: string) => Promise<string>) {
  const system = await startFarhand();
  const agent = await system.agent(through && { through: await through(system.grpc) });
  const presence = vi.mocked(Presence).mock.instances.at(-1)!;
  return { system, agent, stub: (): AgentStub => presence.get(agent.machineId).stub };
}

function spec(line: string) {
  const size = { cols: 80, rows: 24 };
  return { program: '/bin/sh', args: ['-c', line], size, grace_ms: 60_000 };
}

interface Params {
  id: string;
  client_id: string;
  offset?: number;
  /** If false, the client acknowledges no output. */
  taking?: boolean;
  /** The output received. */
  into: Buffer[];
  /** Called with the number of received bytes. If it returns true, the client detaches. */
  enough(bytes: number): boolean;
}

/** Attaches a client that reads until `enough` returns true or the call ends. */
async function attach(stub: AgentStub, { taking = true, into, enough, ...open }: Params): Promise<void> {
  const doings: object[] = [{ open }];
  let wake = (): void => {};
  let over = false;
  async function* requests() {
    while (!over) {
      const next = doings.shift();
      if (next) yield next;
      else
        await new Promise<void>((resolve) => {
          wake = resolve;
        });
    }
  }
  let bytes = 0;
  try {
    for await (const { output } of stub.attachTerminal(requests(), options)) {
      if (!output) continue;
      into.push(Buffer.from(output.data));
      bytes += output.data.length;
      if (taking) doings.push({ taken: output.offset + output.data.length });
      wake();
      if (enough(bytes)) return;
    }
  } finally {
    over = true;
    wake();
  }
}

test('an agent without terminals does not offer them, and the broker refuses sessions with the reason', async () => {
  const arch = vi.spyOn(process, 'arch', 'get').mockReturnValue('mips');
  try {
    const { stub } = await startLinked();
    const events = stub().openTerminal({ id: newId('session'), spec: spec('true') }, options);
    await expect(events[Symbol.asyncIterator]().next()).rejects.toMatchObject({ code: 'not_supported' });
  } finally {
    arch.mockRestore();
  }
});

test('a client continues without a gap after the link was cut during much output', async () => {
  const opened = Promise.withResolvers<Awaited<ReturnType<typeof startProxy>>>();
  const { system, agent, stub } = await startLinked(async (grpc) => {
    opened.resolve(await startProxy(grpc));
    return (await opened.promise).address;
  });
  const proxy = await opened.promise;
  // The session keeps the terminal open while no client is attached.
  const args = ['-c', 'seq 1 1000000; sleep 600'];
  const shell = { machine_id: agent.machineId, shell: '/bin/sh', args };
  const { id } = await system.client.sessions.create({ ...shell, grace_period: 600_000 });
  const into: Buffer[] = [];
  const position = (): number => into.reduce((sum, { length }) => sum + length, 0);
  const client = { id, client_id: 'c', into };
  const cutAt = (at: number) => (bytes: number) => {
    if (bytes >= at) proxy.cut();
    return false;
  };
  for (const stop of [1_000_000, 2_000_000]) {
    const down = agent.linked(false);
    const up = agent.linked(true);
    await expect(attach(stub(), { ...client, offset: position(), enough: cutAt(stop) })).rejects.toThrow();
    await down;
    await up;
  }
  const expected = Buffer.from(Array.from({ length: 1_000_000 }, (_, i) => `${i + 1}\r\n`).join(''));
  const rest = expected.length - position();
  await attach(stub(), { ...client, offset: position(), enough: (bytes) => bytes >= rest });
  const digest = (bytes: Buffer): string => createHash('sha256').update(bytes).digest('hex');
  expect(digest(Buffer.concat(into))).toBe(digest(expected));
});

test('output does not wait for a client that detached while the machine was linked', async () => {
  const { agent, stub } = await startLinked();
  for (let round = 0; round < 5; round++) {
    const id = newId('session');
    const done = join(agent.dataDir, id);
    const line = `yes | head -c 1000000; touch ${done}; sleep 60`;
    const keeper = stub()
      .openTerminal({ id, spec: spec(line) }, options)
      [Symbol.asyncIterator]();
    await keeper.next();
    const enough = (bytes: number): boolean => bytes >= 100_000;
    await attach(stub(), { id, client_id: 'c', taking: false, into: [], enough });
    // Output waits up to 5 s for a client that has lost its link. This client has detached, so the output must not
    // wait: the timeout is shorter than 5 s.
    await waitFor(() => readFile(done), { timeout: 4_500 });
    await keeper.return?.(undefined);
  }
});

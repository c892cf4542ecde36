// Output of commands is complete over lost links and restarts of the broker, and contains no byte twice.
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { expect, onTestFinished, test } from 'vitest';
import { bench, bodyBytes, gate, listen, nothingReceived, output } from '../commands-fixture.ts';
import { startFarhand } from '../start-farhand.ts';
import { startProxy } from '../tcp-proxy.ts';
import { startBrokerProgram } from './broker-program.ts';

function written(command: string): Buffer {
  return execFileSync('sh', ['-c', command], { maxBuffer: 2 ** 28 });
}

function digest(bytes: Uint8Array): string {
  return createHash('sha256').update(bytes).digest('hex');
}

test('a link that is cut repeatedly during 100,000 lines loses and repeats nothing', async () => {
  const { system, proxy, agent, begin, ended } = await bench();
  const gates = Array.from({ length: 3 }, gate);
  const parts = gates.map(({ wait }, n) => `${wait}; seq ${n * 25_000 + 25_001} ${n * 25_000 + 50_000}`);
  const id = await begin(`seq 1 25000; ${parts.join('; ')}`);
  const received = nothingReceived();
  // Waits for the first output. If the link were cut before the command has started, the command might never run.
  await listen(system, id, received, ({ stdout }) => stdout.length > 0);
  const all = listen(system, id, received);
  for (const { open } of gates) {
    const back = agent.linked(true);
    const off = agent.linked(false);
    open();
    proxy.cut();
    await off;
    await back;
  }
  await all;
  expect(digest(received.stdout)).toBe(digest(written('seq 1 100000')));
  expect(await ended(id)).toMatchObject({ status: 'completed', stdout_bytes: received.stdout.length });
  expect(digest(await bodyBytes(await output(system, id)))).toBe(digest(received.stdout));
});

test('a broker that is stopped during a command asks its readers to reconnect, and no byte is lost after its restart', async () => {
  const { system, proxy, agent, begin } = await bench();
  const { wait, open } = gate();
  const id = await begin(`seq 1 50000; printf tiny >&2; ${wait}; seq 50001 100000; printf end >&2`);
  const received = nothingReceived();
  await listen(system, id, received, ({ stdout }) => stdout.length === 288_894);
  const cutOff = await output(system, id, 'follow=true');
  const cutEvents = await output(system, id, '', {}, 'stream');
  proxy.forbid();
  const cut = [expect(cutOff.text()).rejects.toThrow(), expect(cutEvents.text()).rejects.toThrow()];
  const begun = performance.now();
  await system.broker.close();
  // A stopping broker waits up to 4 s for open requests to end. It stopped sooner, because it had asked its readers to
  // reconnect.
  expect(performance.now() - begun).toBeLessThan(3_500);
  await Promise.all(cut);
  open();
  const again = await startFarhand({ dataDir: system.dataDir, flags: ['--grpc', system.grpc] });
  const back = agent.linked(true);
  proxy.allow();
  await back;
  await listen(again, id, received);
  expect(digest(received.stdout)).toBe(digest(written('seq 1 100000')));
  expect(received.stderr.toString()).toBe('tinyend');
  expect(digest(await bodyBytes(await output(again, id)))).toBe(digest(received.stdout));
  expect(await (await output(again, id, 'stream=stderr')).text()).toBe('tinyend');
});

test('after a broker was killed with SIGKILL during a command, its restart loses and repeats no byte', async () => {
  const broker = await startBrokerProgram();
  const { client } = broker;
  const proxy = await startProxy(broker.grpc);
  onTestFinished(() => proxy.close());
  const elsewhere = await startFarhand();
  const { token } = await client.joinTokens.create({ uses: 1 });
  const agent = await elsewhere.agent({ through: proxy.address, joinToken: token });
  const gates = [gate(), gate()];
  const { id } = await client.commands.async({
    machine_id: agent.machineId,
    command: `seq 1 30000; ${gates[0]!.wait}; seq 30001 60000; ${gates[1]!.wait}; seq 60001 100000`,
  });
  const received = nothingReceived();
  await listen({ client }, id, received, ({ stdout }) => stdout.length > 20_000);
  for (const { open } of gates) {
    open();
    await broker.kill();
    const back = agent.linked(true);
    await broker.start();
    await back;
    const so = received.stdout.length;
    await listen({ client }, id, received, ({ stdout }) => stdout.length > so);
  }
  if (!received.exit) await listen({ client }, id, received);
  expect(digest(received.stdout)).toBe(digest(written('seq 1 100000')));
  expect(digest(await bodyBytes(await output({ url: `http://${broker.http}`, key: broker.key }, id)))).toBe(
    digest(received.stdout),
  );
  expect((await client.commands.get({ command_id: id })).status).toBe('completed');
  const { items } = await client.events.list({ type: 'command.started' });
  expect(items).toHaveLength(1);
});

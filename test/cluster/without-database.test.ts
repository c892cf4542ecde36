// A broker that cannot reach the database. It hands its agents and clients over to another broker that reaches the
// database. Without such a broker, they stay connected.
import { expect, onTestFinished, test, vi } from 'vitest';
import { Farhand } from '../../shared/sdk/index.ts';
import { gate, soon } from '../commands-fixture.ts';
import { copyOf, createServer, databaseOf, withPostgres } from '../postgres/postgres-fixture.ts';
import { startFarhand } from '../start-farhand.ts';
import { program } from '../start-processes.ts';
import { startProxy } from '../tcp-proxy.ts';
import { waitFor } from '../wait-for.ts';

// Each test starts PostgreSQL and a broker as processes, and waits until leases of 10 s have ended.
vi.setConfig({ testTimeout: 180_000 });

const leaseIsOver =
  'the lease of this broker ended before it could be renewed; other brokers may now take over its machines; trying again every 2 s';
const handsOver =
  'this broker cannot reach the database, but another broker can: this broker ends its links and streams, so that agents and clients connect to another broker';

/**
 * Starts two brokers on one database. `cut` is a separate process and reaches the database through a proxy, and `other`
 * reaches it directly. The agent is linked to `cut`, and has the addresses of both brokers.
 */
async function startBoth() {
  const server = await createServer();
  const url = await server.createDatabase();
  const peer = ['--peer-listen', '127.0.0.1:0'];
  const other = await startFarhand({ flags: ['--database-url', url, ...peer] });
  const toDatabase = await startProxy(`127.0.0.1:${server.port}`);
  onTestFinished(() => toDatabase.close());
  const throughProxy = `postgres://farhand@${toDatabase.address}/${databaseOf(url)}?sslmode=disable`;
  const ports = ['--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
  const flags = ['--data-dir', copyOf(other.dataDir), '--database-url', throughProxy, ...peer, ...ports];
  // Repeated failures are logged at the level debug.
  const cut = program('broker/main.ts', [...flags, '--log-level', 'debug']);
  const { http, grpc } = await cut.line('broker is up');
  const client = new Farhand({ baseUrl: String(http), apiKey: other.key, retries: 0 });
  const toOther = await startProxy(other.grpc);
  onTestFinished(() => toOther.close());
  toOther.forbid();
  const agent = await other.agent({ through: `${String(grpc)},${toOther.address}` });
  toOther.allow();
  const query = (sql: string) => server.query(sql, databaseOf(url));
  const machine_id = agent.machineId;
  return {
    ...{ server, query, other, toDatabase, toOther, cut, client, agent, machine_id },
    url: String(http),
  };
}

withPostgres('a broker without the database', () => {
  test.each([
    { what: 'loses every packet', cutOff: 'stall', bring: 'resume' },
    { what: 'refuses connections', cutOff: 'forbid', bring: 'allow' },
  ] as const)(
    'hands its agents over if its network $what, and takes agents again when it reaches the database again',
    async ({ cutOff, bring }) => {
      const { other, toDatabase, client, toOther, agent, machine_id } = await startBoth();
      const { wait, open } = gate();
      const lines = (from: number, to: number) => `seq -f 'line %.0f' ${from} ${to}`;
      const command = `${lines(1, 50_000)}; ${wait}; ${lines(50_001, 100_000)}`;
      const { id } = await client.commands.async({ machine_id, command });
      await soon(async () => (await client.commands.get({ command_id: id })).stdout_bytes).toBe(538_894);
      toDatabase[cutOff]();
      const begun = performance.now();
      await agent.linked(false);
      await agent.linked(true);
      expect(performance.now() - begun).toBeLessThan(20_000);
      await expect(client.service.readyz()).rejects.toMatchObject({ code: 'unavailable', status: 503 });
      expect(await other.client.service.readyz()).toBe('ready\n');
      await soon(async () => (await other.client.commands.get({ command_id: id })).status).toBe('running');
      open();
      await soon(async () => (await other.client.commands.get({ command_id: id })).status).toBe('completed');
      const { body } = await other.call('GET', `/commands/${id}/output`);
      expect(body).toBe(`${Array.from({ length: 100_000 }, (_, n) => `line ${n + 1}`).join('\n')}\n`);
      toDatabase[bring]();
      await soon(() => client.service.readyz().catch(() => 'not ready')).toBe('ready\n');
      // Only now the agent loses its link. While `cut` refuses it, its pauses between attempts grow to 30 s.
      const linkedAgain = agent.linked(false).then(() => agent.linked(true));
      toOther.forbid();
      await linkedAgain;
      await soon(() =>
        client.commands.create({ machine_id, command: 'echo back', wait: 10_000 }),
      ).toMatchObject({ status: 'completed', stdout: 'back\n' });
      expect(await client.service.readyz()).toBe('ready\n');
    },
  );

  test('ends streams and terminals when it hands its agents over, and clients continue at the other broker without a gap', async () => {
    const { other, toDatabase, url, machine_id } = await startBoth();
    const toBroker = await startProxy(new URL(url).host);
    onTestFinished(() => toBroker.close());
    const client = new Farhand({ baseUrl: `http://${toBroker.address}`, apiKey: other.key });
    const { wait, open } = gate();
    const { id } = await client.commands.async({ machine_id, command: `seq 1 500; ${wait}; seq 501 1000` });
    let output = '';
    const others: object[] = [];
    const following = (async () => {
      for await (const { data } of await client.commands.stream({ command_id: id }))
        if ('data' in data) output += data.data;
        else others.push(data);
    })();
    const completed = (async () => {
      for await (const { event, data } of await client.events.stream({ types: ['command.completed'] }))
        if (event === 'command.completed') return data;
      return undefined;
    })();
    const args = ['-c', 'echo ready; read line; echo "got $line"'];
    const { session_id } = await client.sessions.create({ machine_id, shell: '/bin/sh', args });
    const terminal = await client.sessions.terminal(await client.sessions.attach({ session_id }));
    let screen = '';
    const read = async (from: typeof terminal) => {
      for await (const bytes of from.output) screen += Buffer.from(bytes).toString();
    };
    const reading = read(terminal);
    await soon(() => screen).toBe('ready\r\n');
    await soon(() => output.endsWith('\n500\n')).toBe(true);
    toBroker.aim(new URL(other.url).host);
    toDatabase.stall();
    expect(await terminal.ended).toEqual({ why: 'stopping' });
    await reading;
    const { offset } = terminal;
    const again = await waitFor(async () =>
      client.sessions.terminal(await client.sessions.attach({ session_id, offset })),
    );
    const readingAgain = read(again);
    await again.write('words\r');
    expect(await again.ended).toMatchObject({ why: 'ended', exit_code: 0 });
    await readingAgain;
    expect(screen).toBe('ready\r\nwords\r\ngot words\r\n');
    open();
    await following;
    expect(others).toMatchObject([{ status: 'completed' }]);
    expect(output).toBe(Array.from({ length: 1_000 }, (_, n) => `${n + 1}\n`).join(''));
    expect(await completed).toMatchObject({ data: { command_id: id } });
  });

  test('has the work of its machines again if no other broker has claimed them meanwhile', async () => {
    const { query, toDatabase, cut, client, agent, machine_id } = await startBoth();
    await agent.close();
    const { id: command_id } = await client.commands.async({
      ...{ machine_id, command: 'true' },
      queue_for: 600_000,
    });
    await query(
      `CREATE FUNCTION stay() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN RETURN CASE WHEN NEW.broker_id = OLD.broker_id THEN NEW END; END $$;
       CREATE TRIGGER stay BEFORE UPDATE ON owners FOR EACH ROW EXECUTE FUNCTION stay()`,
    );
    toDatabase.forbid();
    await cut.line(handsOver);
    toDatabase.allow();
    await soon(() => client.commands.cancel({ command_id })).toMatchObject({ status: 'cancelled' });
  });

  test('keeps its agents if no broker reaches the database, or if the other broker reaches it first', async () => {
    const { server, other, toDatabase, cut, client, agent, machine_id } = await startBoth();
    const lost = vi.fn();
    void agent.linked(false).then(lost);
    await server.stop('SIGKILL');
    // `cut` logs this line each time it finds that its lease has ended. Each time it also asks whether another broker
    // reaches the database.
    for (let n = 0; n < 5; n += 1) await cut.line(leaseIsOver);
    toDatabase.forbid();
    await server.start();
    await soon(async () => (await other.call('GET', '/machines')).status).toBe(200);
    for (let n = 0; n < 2; n += 1) await cut.line(leaseIsOver);
    toDatabase.allow();
    await soon(() =>
      client.commands.create({ machine_id, command: 'echo back', wait: 10_000 }),
    ).toMatchObject({ status: 'completed', stdout: 'back\n' });
    expect(lost).not.toHaveBeenCalled();
  });
});

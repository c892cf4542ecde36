// Two brokers on one database: requests over REST, WebSocket and gRPC to the broker that does not own the machine.
import { expect, onTestFinished, test } from 'vitest';
import { WebSocket } from 'ws';
import { shared } from '../close-after-tests.ts';
import { gate, soon } from '../commands-fixture.ts';
import { all, hearing, streamsOf } from '../grpc-fixture.ts';
import { createServer, startTwo, withPostgres } from '../postgres/postgres-fixture.ts';

/** `front` gets the requests. The machine is linked to `owner`. */
async function startOnOneDatabase() {
  const { one: owner, two: front } = await startTwo(await createServer());
  const { machineId } = await owner.agent();
  const machine = `/machines/${machineId}/files/stat?path=/etc`;
  await soon(async () => (await front.call('GET', machine)).status).toBe(200);
  return { owner, front, machineId };
}

const system = shared(startOnOneDatabase);

withPostgres('at the broker that does not own the machine', () => {
  test('a WebSocket with a wrong ticket, also from another origin or for an unknown session, is refused', async () => {
    const { front, machineId: machine_id } = await system();
    const { id } = await front.client.sessions.create({ machine_id, shell: '/bin/sh' });
    const statusOf = (path: string, origin?: string) =>
      new Promise((resolve) => {
        const socket = new WebSocket(`${front.url.replace('http', 'ws')}/api/v1/sessions/${path}`, {
          ...(origin && { origin }),
        });
        socket.once('unexpected-response', (_request, { statusCode }) => resolve(statusCode));
        socket.once('open', () => resolve(101));
        socket.once('error', resolve);
      });
    expect(await statusOf(`${id}/stream?ticket=wrong`)).toBe(401);
    expect(await statusOf(`${id}/stream?ticket=wrong`, 'http://elsewhere.example')).toBe(403);
    expect(await statusOf('sess_none/stream?ticket=wrong')).toBe(401);
    await front.client.sessions.end({ session_id: id });
  });

  test('a terminal over WebSocket gets input, and its output arrives to the end', async () => {
    const { front, machineId: machine_id } = await system();
    const args = ['-c', 'read line; echo "got $line"; exit 4'];
    const { id } = await front.client.sessions.create({ machine_id, shell: '/bin/sh', args });
    const { stream_url } = await front.client.sessions.attach({ session_id: id });
    const { search } = new URL(stream_url);
    const path = `/api/v1/sessions/${id}/stream${search}`;
    const socket = new WebSocket(front.url.replace('http', 'ws') + path);
    onTestFinished(() => socket.terminate());
    let output = '';
    const ended = new Promise<[number, unknown]>((resolve) => {
      let last: unknown;
      socket.on('message', (data: Buffer, binary) => {
        if (binary) output += data.toString();
        else last = JSON.parse(data.toString());
      });
      socket.once('close', (code) => resolve([code, last]));
    });
    socket.once('open', () => socket.send(Buffer.from('words\r')));
    expect(await ended).toMatchObject([1000, { type: 'end', exit_code: 4 }]);
    expect(output).toContain('got words');
  });

  test('a command is followed, gets input and is cancelled by its id', async () => {
    const { front, machineId: machine_id } = await system();
    const { commands } = front.client;
    const { id } = await commands.async({
      machine_id,
      command: 'read a; echo got $a; sleep 60',
      input: true,
    });
    await commands.input({ command_id: id, data: 'words\n' });
    const seen: string[] = [];
    for await (const { event, data } of await commands.stream({ command_id: id })) {
      if ('data' in data) seen.push(data.data);
      if (event === 'output') break;
    }
    expect(seen).toEqual(['got words\n']);
    expect((await commands.get({ command_id: id })).stdout).toBe('got words\n');
    expect((await commands.cancel({ command_id: id })).status).toBe('cancelled');
  });

  test('a gRPC call follows a command by its id', async () => {
    const { front, machineId: machine_id } = await system();
    const { wait, open } = gate();
    const { id } = await front.client.commands.async({ machine_id, command: `${wait}; echo done` });
    const client = await streamsOf(front);
    const following = all(client.followCommand({ command_id: id }));
    open();
    const messages = await following;
    const { heard, take } = hearing();
    for (const { output } of messages) take(output);
    expect([heard.stdout.toString(), messages.at(-1)?.end?.exit_code]).toEqual(['done\n', 0]);
  });

  test('a schedule is changed, run and removed by its id', async () => {
    const { front, machineId: machine_id } = await system();
    const { schedules } = front.client;
    const made = await schedules.create({
      machine_id,
      name: 'forwarded',
      cron: '0 0 1 1 *',
      command: 'echo ran',
    });
    await schedules.update({ schedule_id: made.id, name: 'renamed' });
    await schedules.run({ schedule_id: made.id });
    await soon(async () => {
      const { items } = await schedules.history({ schedule_id: made.id });
      return items.map(({ status }) => status);
    }).toEqual(['completed']);
    await schedules.remove({ schedule_id: made.id });
    expect((await front.call('GET', `/schedules/${made.id}`)).status).toBe(404);
  });

  test('a key works for a forwarded request as soon as it is made', async () => {
    const { front, machineId } = await system();
    for (let n = 0; n < 10; n += 1) {
      const { key } = await front.keyed(['files:read']);
      const { status } = await front.call('GET', `/machines/${machineId}/files/stat?path=/etc`, { key });
      expect(status).toBe(200);
    }
  });
});

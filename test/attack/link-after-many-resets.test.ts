// Calls that fail or are cancelled do not end the link, although HTTP/2 ends a connection after too many resets.
import { status as grpcStatus } from '@grpc/grpc-js';
import { expect, test } from 'vitest';
import { type ScriptedAgent, scriptedMachine, statusOf } from '../scripted-agent.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';

const content = ({ identity }: ScriptedAgent): string =>
  `/machines/${identity.machineId}/files/content?path=/a`;

test('1,200 failed calls do not affect the link', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const error = { code: 'file_not_found', message: '', details: '{}' };
  // HTTP/2 ends a connection after about a thousand resets of streams, so an error must not reset its stream.
  for (let n = 0; n < 1_200; n += 1) {
    const answer = system.call('GET', content(agent));
    const stream = agent.answer((await agent.next('call')).call_id);
    stream.write({ error });
    stream.end();
    const [{ status }, code] = await Promise.all([answer, statusOf(stream)]);
    expect([n, status, code]).toEqual([n, 404, grpcStatus.OK]);
  }
});

test('1,300 cancelled calls do not affect the link', async () => {
  const system = await startFarhand();
  await system.agent();
  const { items } = await system.client.machines.list();
  const path = `/machines/${items[0]?.id}/files/watch?path=${temporaryFolder('watched')}`;
  const headers = { Authorization: `Bearer ${system.key}` };
  let turns = 0;
  async function watcher(): Promise<void> {
    while (turns < 1_300) {
      turns += 1;
      const gone = new AbortController();
      const { status, body } = await fetch(`${system.url}/api/v1${path}`, { headers, signal: gone.signal });
      expect([turns, status]).toEqual([turns, 200]);
      gone.abort();
      await expect(body?.getReader().read()).rejects.toThrow();
    }
  }
  await Promise.all(Array.from({ length: 16 }, watcher));
});

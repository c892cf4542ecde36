// The console's page of a batch: the output of many machines in one stream.
import { expect } from 'vitest';
import { nextCall, reporting } from '../commands-fixture.ts';
import { connectScripted, joinScripted } from '../scripted-agent.ts';
import { browserTest, newLogin, startWithConsole } from './browser.ts';

const machines = 50;

browserTest('a batch on 50 machines shows every line, over two connections', async () => {
  const system = await startWithConsole();
  const { token } = await system.client.joinTokens.create({ uses: machines });
  const enrolment = { grpc: system.grpc, joinToken: () => Promise.resolve(token) };
  const names = Array.from({ length: machines }, (_, index) => `node-${index}`);
  const agents = await Promise.all(
    names.map(async (name) => {
      const agent = await connectScripted(system.grpc, await joinScripted(enrolment, name));
      await agent.next('welcome');
      return agent;
    }),
  );
  const machine_ids = agents.map(({ identity }) => identity.machineId);
  const batch = await system.client.batches.create({ machine_ids, command: 'work', wait: 0 });
  const window = await newLogin(system);
  const { page } = window;
  const streams: string[] = [];
  page.on('response', (response) => {
    const type = response.headers()['content-type'] ?? '';
    if (type.startsWith('text/event-stream')) streams.push(new URL(response.url()).pathname);
  });
  await window.open(`/batches/${batch.id}?view=cards`);
  await expect.poll(() => streams).toContain(`/api/v1/batches/${batch.id}/stream`);
  await Promise.all(
    agents.map(async (agent, index) => {
      const { call_id } = await nextCall(agent, 'StartProcess');
      const { started, stdout, exited, end } = reporting(agent, call_id);
      started();
      const lines = [0, 1, 2].map((line) => `line ${line} of node-${index}.\n`);
      let offset = 0;
      for (const line of lines) {
        stdout(offset, line);
        offset += line.length;
      }
      exited(offset);
      end();
    }),
  );
  await page.getByRole('list', { name: 'Machines' }).getByText('line 2 of node-49.').waitFor();
  const text = async (): Promise<string> =>
    (await page.getByRole('list', { name: 'Machines' }).textContent()) ?? '';
  const expected = names.flatMap((name) => [0, 1, 2].map((line) => `line ${line} of ${name}.`));
  await expect
    .poll(async () => {
      const displayed = await text();
      return expected.filter((line) => displayed.split(line).length !== 2);
    })
    .toEqual([]);
  expect([...new Set(streams)].sort()).toEqual([`/api/v1/batches/${batch.id}/stream`, '/api/v1/live']);
  expect(window.faults).toEqual([]);
});

// Measures commands of a fleet: a batch on all machines, many commands at once on one machine, and many small reads at
// once from one machine.
import { setTimeout as sleep } from 'node:timers/promises';
import { Pool } from 'undici';
import { rounded } from '../compare-programs-in-turns.ts';
import { at, timed } from '../start-and-measure-programs.ts';
import type { Fleet } from './fleet-context.ts';
import { Prober } from './http-load.ts';
import { describeProbe, milliseconds } from './print-figures.ts';

/** Maximum number of machines in one batch. */
const mostOfBatch = 10_000;
/**
 * Number of commands that the part `cold` measures. They are the first commands after the start of the broker, when V8
 * has not compiled the code yet.
 */
const firstCommands = 50;
const oneByOne = 200;
const commandsAtOnce = 128;
const readsAtOnce = 64;
const rounds = 5;
const pauseMs = 500;
/** Milliseconds between two checks whether a batch has ended. */
const pollMs = 500;

export async function runCommands(fleet: Fleet): Promise<void> {
  await oneAtATime(fleet);
  fleet.figures.profile('batch to all', await fleet.broker.profile(() => batchOnAll(fleet)));
}

/** Measures the first commands after the start of the broker. */
export async function runColdCommands({ client, agents, figures }: Fleet): Promise<void> {
  const times = await timed(firstCommands, () => runTrue(client, agents.machineIds.at(-1) ?? ''));
  figures.row(
    `first ${firstCommands} \`POST /commands\` of a fresh broker, one at a time: p50 / longest`,
    `${milliseconds(at(times, 0.5))} / ${milliseconds(times.at(-1) ?? Number.NaN)}`,
  );
}

async function oneAtATime({ client, agents, figures }: Fleet): Promise<void> {
  const times = await timed(oneByOne, () => runTrue(client, agents.machineIds.at(-1) ?? ''));
  figures.row(
    '`POST /commands` to one machine, one request at a time: p50 / p99',
    `${milliseconds(at(times, 0.5))} / ${milliseconds(at(times, 0.99))}`,
  );
}

const runTrue = (client: Fleet['client'], machine_id: string): Promise<unknown> =>
  client.commands.create({ machine_id, command: 'true' });

/** Runs one command on every machine, in as few batches as possible, all at the same time. */
async function batchOnAll({ broker, client, agents, figures }: Fleet): Promise<void> {
  const ids = agents.machineIds;
  const prober = new Prober(broker.http, `/api/v1/machines/${ids[0]}`, broker.key);
  await sleep(pauseMs);
  const [begun, cpu] = [Date.now(), broker.cpu()];
  const parts = Array.from({ length: Math.ceil(ids.length / mostOfBatch) }, (_, n) =>
    ids.slice(n * mostOfBatch, (n + 1) * mostOfBatch),
  );
  const made = await Promise.all(
    parts.map((machine_ids) => client.batches.create({ machine_ids, command: 'true', wait: 0 })),
  );
  const answered = (Date.now() - begun) / 1000;
  let ended = 0;
  for (const { id } of made) {
    for (;;) {
      // Reads a list, because GET /batches/{id} would also return the result of every machine.
      const { items } = await client.batches.list({ id, limit: 1 });
      const at = items[0]?.finished_at;
      if (at) ended = Math.max(ended, Date.parse(at));
      if (at) break;
      await sleep(pollMs);
    }
  }
  // `ended` is the time that the broker has stored, so the pause between two polls does not change the result. Shorter
  // pauses would only cost the broker CPU.
  const seconds = (ended - begun) / 1000;
  const probed = await prober.stop();
  const batches = await Promise.all(made.map(({ id }) => client.batches.list({ id, limit: 1 })));
  const completed = batches.reduce((sum, { items }) => sum + (items[0]?.counts.completed ?? 0), 0);
  figures.row(
    `${made.length} batch of ${ids.length} machines`,
    `${seconds.toFixed(2)} s until the end of the commands (request answered after ${answered.toFixed(2)} s), ${rounded(broker.cpu() - cpu)} s of CPU, ${completed} completed`,
  );
  figures.row('`GET /machines/{machine_id}` meanwhile', describeProbe(probed));
}

/** Sends many requests for one machine at once, and counts the refused ones. */
export async function runAtOnce({ broker, agents, figures }: Fleet): Promise<void> {
  const machine_id = agents.machineIds[1] ?? '';
  const command = {
    method: 'POST',
    path: '/api/v1/commands',
    body: { machine_id, command: 'true' },
  } as const;
  const path = `/api/v1/machines/${machine_id}/files/content?path=/etc/simulated/file-1`;
  const read = { method: 'GET', path, body: undefined } as const;
  for (const [what, request, width] of [
    ['commands', command, commandsAtOnce],
    ['small file reads', read, readsAtOnce],
  ] as const) {
    const pool = new Pool(broker.http, { connections: width });
    const headers = { authorization: `Bearer ${broker.key}`, 'content-type': 'application/json' };
    const body = request.body ? JSON.stringify(request.body) : null;
    const statuses = new Map<number, number>();
    const begun = performance.now();
    for (let round = 0; round < rounds; round += 1) {
      const send = async (): Promise<void> => {
        const answer = await pool.request({ method: request.method, path: request.path, headers, body });
        await answer.body.dump();
        statuses.set(answer.statusCode, (statuses.get(answer.statusCode) ?? 0) + 1);
      };
      await Promise.all(Array.from({ length: width }, send));
    }
    const each = (performance.now() - begun) / rounds;
    await pool.close();
    const refused = (statuses.get(503) ?? 0) / (width * rounds);
    const counts = [...statuses].map(([status, count]) => `${count} x ${status}`).join(', ');
    figures.row(
      `${width} ${what} at once to one machine, ${rounds} times: share of 503`,
      `${(refused * 100).toFixed(0)} % (${counts}), ${milliseconds(each)} each time`,
    );
  }
}

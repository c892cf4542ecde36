// The load of the soak test on the brokers: commands, batches, keys, schedules, a webhook, and a client that follows
// the events.
import { randomUUID } from 'node:crypto';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { type Access, type Answer, get, idOf, insist, itemsOf } from './repeated-requests.ts';

export interface LoadSettings extends Access {
  folder: string;
  /** Ids of machines with real agents, and of simulated ones. */
  real: readonly string[];
  simulated: readonly string[];
  hook: string;
}

/** A running load, with lists of everything that the brokers have confirmed. */
export interface Load {
  /**
   * File to which each command on a real machine appends its marker as a line. These lines prove how often each command
   * ran.
   */
  counter: string;
  /** The markers of the accepted commands on real machines, by the command's id. */
  commands: Map<string, string>;
  /**
   * The markers of the accepted batches, by the batch's id. Each batch runs on all real machines, and each of its
   * commands appends the batch's marker to `counter`.
   */
  batches: Map<string, string>;
  /** Ids of the accepted commands on simulated machines. */
  simulatedCommands: string[];
  /** The number of machines of each accepted batch on simulated machines, by the batch's id. */
  simulatedBatches: Map<string, number>;
  /** Names of keys that were created. */
  keys: string[];
  real: readonly string[];
  /** Schedules, with the milliseconds between two runs and the time of the creation, in milliseconds since 1970. */
  schedules: { id: string; everyMs: number; createdAt: number }[];
  /** Time of the end of the load, in milliseconds since 1970. Schedules must have rows for all due times until then. */
  endedAt: number;
  /** Ids of the events that the client of the event stream got, in the order of their arrival. */
  events: string[];
  /** Number of requests that were repeated, because they failed or got no final answer. */
  repeats: number;
  /**
   * Sends no further requests, and waits until all commands have ended. Throws if some have not ended after `settleMs`
   * milliseconds.
   */
  stop(settleMs: number): Promise<void>;
}

type Send = (path: string, body: object) => Promise<Answer>;

const betweenMs = 150;
const queue_for = 600_000;
/** Number of simulated machines of one batch. */
const batchOf = 50;
/** One in this number of simulated machines has a schedule. */
const scheduledOf = 20;

/** Follows the events through the proxy. After a lost connection, continues after the last event. */
async function follow(settings: LoadSettings, events: string[], signal: AbortSignal): Promise<void> {
  while (!signal.aborted) {
    try {
      const headers = {
        Authorization: `Bearer ${settings.key}`,
        ...(events.length > 0 && { 'Last-Event-ID': events.at(-1) ?? '' }),
      };
      const answer = await fetch(`${settings.url}/api/v1/events/stream`, { headers, signal });
      let rest = '';
      for await (const chunk of answer.body ?? []) {
        rest += Buffer.from(chunk).toString();
        const lines = rest.split('\n');
        rest = lines.pop() ?? '';
        for (const line of lines) if (line.startsWith('id:')) events.push(line.slice(3).trim());
      }
    } catch {
      // The broker was killed. The loop connects to another broker, and continues after the last event.
    }
    await sleep(100);
  }
}

export async function startLoad(settings: LoadSettings): Promise<Load> {
  const ending = new AbortController();
  const load: Load = {
    ...{
      counter: join(settings.folder, 'counter'),
      real: settings.real,
      commands: new Map(),
      batches: new Map(),
    },
    ...{ simulatedCommands: [], simulatedBatches: new Map(), keys: [], schedules: [], events: [] },
    ...{ endedAt: 0, repeats: 0, stop: async () => {} },
  };
  const send: Send = (path, body) =>
    insist(settings, path, body, () => {
      load.repeats += 1;
    });
  await send('/webhooks', { url: settings.hook, events: ['command.completed'] });
  await createSchedules(load, settings, send);
  const following = follow(settings, load.events, ending.signal);
  const repeat = async (work: (n: number) => Promise<void>, from: number, step: number): Promise<void> => {
    for (let n = from; !ending.signal.aborted; n += step) {
      await work(n);
      await sleep(betweenMs);
    }
  };
  const all = Promise.all(
    workers(load, settings, send).map(([work, from, step]) => repeat(work, from, step)),
  );
  // stop() throws the errors of these promises. Without this handler, an earlier error would end the process as an
  // unhandled rejection.
  all.catch(() => {});
  load.stop = async (settleMs) => {
    ending.abort();
    await all;
    load.endedAt = Date.now();
    await waitForCommands(settings, load.endedAt + settleMs);
    await following;
    // The last events may arrive late, so the event stream is read for another 3 s.
    const last = new AbortController();
    const rest = follow(settings, load.events, last.signal);
    await sleep(3_000);
    last.abort();
    await rest;
  };
  return load;
}

async function createSchedules(load: Load, { real, simulated }: LoadSettings, send: Send): Promise<void> {
  const create = async (machine_id: string, seconds: number): Promise<void> => {
    const body = { machine_id, name: `every ${seconds} s`, cron: `*/${seconds} * * * * *`, command: 'true' };
    const id = idOf(await send('/schedules', body), 'a schedule');
    load.schedules.push({ id, everyMs: seconds * 1_000, createdAt: Date.now() });
  };
  const some = simulated.filter((_, n) => n % scheduledOf === 0);
  await Promise.all([...real.map((id) => create(id, 5)), ...some.map((id) => create(id, 10))]);
}

type Worker = [work: (n: number) => Promise<void>, from: number, step: number];

function workers(load: Load, settings: LoadSettings, send: Send): Worker[] {
  const { real, simulated } = settings;
  const { counter } = load;
  const command = async (n: number): Promise<void> => {
    const marker = `command-${randomUUID()}`;
    const body = { machine_id: real[n % real.length], command: `echo ${marker} >>${counter}` };
    const answer = await send('/commands', { ...body, queue_for, wait: n % 3 === 0 ? 5_000 : 0 });
    load.commands.set(idOf(answer, 'a command'), marker);
  };
  const batch = async (): Promise<void> => {
    const marker = `batch-${randomUUID()}`;
    const body = {
      machine_ids: real,
      command: `echo ${marker} >>${counter}`,
      concurrency: 4,
      queue_for,
      wait: 0,
    };
    load.batches.set(idOf(await send('/commands/batch', body), 'a batch'), marker);
    await sleep(3_000);
  };
  const key = async (n: number): Promise<void> => {
    const name = `key-${n}`;
    idOf(await send('/api-keys', { name, scopes: ['machines:read'] }), 'a key');
    load.keys.push(name);
    await sleep(400);
  };
  const simulatedCommand = async (n: number): Promise<void> => {
    const body = { machine_id: simulated[(n * 7) % simulated.length], command: 'true', queue_for };
    const answer = await send('/commands', { ...body, wait: n % 3 === 0 ? 5_000 : 0 });
    load.simulatedCommands.push(idOf(answer, 'a command'));
  };
  const simulatedBatch = async (n: number): Promise<void> => {
    const from = (n * batchOf) % simulated.length;
    const machine_ids = simulated.slice(from, from + batchOf);
    const body = { machine_ids, command: 'true', queue_for, wait: 0 };
    load.simulatedBatches.set(idOf(await send('/commands/batch', body), 'a batch'), machine_ids.length);
    await sleep(3_000);
  };
  const onReal: Worker[] = [
    ...[0, 1, 2].map((from): Worker => [command, from, 3]),
    [batch, 0, 1],
    [key, 0, 1],
  ];
  return simulated.length === 0
    ? onReal
    : [...onReal, [simulatedCommand, 0, 2], [simulatedCommand, 1, 2], [simulatedBatch, 0, 1]];
}

/** Waits until no command is open. Commands of schedules do not count, because the schedules still run. */
async function waitForCommands(settings: LoadSettings, until: number): Promise<void> {
  for (;;) {
    const open = await Promise.all(
      ['queued', 'running'].map(async (status) =>
        itemsOf(await get(settings, `/commands?status=${status}&limit=100`)),
      ),
    );
    const left = open.flat().filter(({ schedule_id }) => schedule_id === null);
    if (left.length === 0) return;
    if (Date.now() > until) throw new Error(`commands do not end: ${JSON.stringify(left.slice(0, 3))}`);
    await sleep(1_000);
  }
}

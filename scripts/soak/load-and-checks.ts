// The requests that the soak test sends to the brokers, and the checks of their results.
import { randomUUID } from 'node:crypto';
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';

interface LoadSettings {
  url: string;
  key: string;
  folder: string;
  /** URL of the receiver of webhooks. */
  hook: string;
}

/** The running requests, and all that the brokers have answered. */
export interface Load {
  /** The file to which every command appends its marker. */
  counter: string;
  /** Markers of the commands whose requests were answered, by the command's id. */
  commands: Map<string, string>;
  /** Markers of the batches whose requests were answered, by the batch's id. */
  batches: Map<string, string>;
  /** Names of keys that were created. */
  keys: string[];
  machines: string[];
  /** Ids of the events that the follower got, in their order. */
  events: string[];
  /** Number of requests that were sent again, because they failed or got no final answer. */
  repeats: number;
  /**
   * Sends no further requests and waits until all commands have ended. Throws if they have not ended after
   * `settleMs` milliseconds.
   */
  stop(settleMs: number): Promise<void>;
}

interface CheckServices {
  query(sql: string): Promise<Record<string, unknown>[]>;
  delivered: readonly string[];
  settleMs: number;
  print(line: string): void;
}

interface Answer {
  status: number;
  body: { data?: unknown; error?: { code: string; message: string; details: Record<string, unknown> } };
}

const betweenMs = 150;

/** Sends a request with an Idempotency-Key again and again until the answer is final. */
async function insist(
  settings: LoadSettings,
  path: string,
  body: object,
  count: () => void,
): Promise<Answer> {
  const headers = {
    Authorization: `Bearer ${settings.key}`,
    'Content-Type': 'application/json',
    'Idempotency-Key': randomUUID(),
    Connection: 'close',
  };
  for (;;) {
    try {
      const text = JSON.stringify(body);
      const signal = AbortSignal.timeout(40_000);
      const answer = await fetch(`${settings.url}/api/v1${path}`, {
        method: 'POST',
        headers,
        body: text,
        signal,
      });
      const received = (await answer.json()) as Answer['body'];
      const underWay = answer.status === 409 && received.error?.details.under_way === true;
      // The client opened this connection ahead of time and sent nothing on it for 15 s.
      const isLate = received.error?.message.includes('send the request again') ?? false;
      if (answer.status !== 503 && answer.status !== 500 && !underWay && !isLate)
        return { status: answer.status, body: received };
    } catch {
      // The broker was killed before or during its answer.
    }
    count();
    await sleep(300);
  }
}

async function get(settings: LoadSettings, path: string): Promise<Answer['body']> {
  for (let tries = 0; ; tries += 1) {
    try {
      const headers = { Authorization: `Bearer ${settings.key}`, Connection: 'close' };
      const answer = await fetch(`${settings.url}/api/v1${path}`, {
        headers,
        signal: AbortSignal.timeout(10_000),
      });
      if (answer.ok) return (await answer.json()) as Answer['body'];
    } catch {
      // The request is sent again below.
    }
    if (tries > 100) throw new Error(`GET ${path} is not answered`);
    await sleep(300);
  }
}

const itemsOf = (answer: Answer['body']): Record<string, unknown>[] =>
  Array.isArray(answer.data) ? (answer.data as Record<string, unknown>[]) : [];

/** Follows the events through the proxy. After each lost connection, continues after the last event. */
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
      // The broker was killed. The next broker continues after the last event.
    }
    await sleep(100);
  }
}

export async function startLoad(settings: LoadSettings): Promise<Load> {
  const machines = itemsOf(await get(settings, '/machines?limit=100')).map(({ id }) => String(id));
  const counter = join(settings.folder, 'counter');
  const ending = new AbortController();
  const load: Load = {
    ...{ counter, machines, commands: new Map(), batches: new Map(), keys: [], events: [], repeats: 0 },
    stop: async () => {},
  };
  const count = (): void => {
    load.repeats += 1;
  };
  const send = (path: string, body: object) => insist(settings, path, body, count);
  const made = (answer: Answer, what: string): string => {
    const { id } = (answer.body.data ?? answer.body.error?.details ?? {}) as { id?: unknown };
    if (typeof id !== 'string') throw new Error(`${what} was answered with ${JSON.stringify(answer)}`);
    return id;
  };
  await send('/webhooks', { url: settings.hook, events: ['command.completed'] });
  for (const machine_id of machines)
    await send('/schedules', { machine_id, name: `every minute`, cron: '* * * * *', command: 'true' });
  const following = follow(settings, load.events, ending.signal);
  const command = async (n: number): Promise<void> => {
    const marker = `command-${randomUUID()}`;
    const body = { machine_id: machines[n % machines.length], command: `echo ${marker} >>${counter}` };
    const answer = await send('/commands', { ...body, queue_for: 600_000, wait: n % 3 === 0 ? 5_000 : 0 });
    load.commands.set(made(answer, 'a command'), marker);
  };
  const batch = async (): Promise<void> => {
    const marker = `batch-${randomUUID()}`;
    const body = { machine_ids: machines, command: `echo ${marker} >>${counter}`, concurrency: 2 };
    load.batches.set(
      made(await send('/commands/batch', { ...body, queue_for: 600_000, wait: 0 }), 'a batch'),
      marker,
    );
    await sleep(2_000);
  };
  const key = async (n: number): Promise<void> => {
    const name = `key-${n}`;
    made(await send('/api-keys', { name, scopes: ['machines:read'] }), 'a key');
    load.keys.push(name);
    await sleep(400);
  };
  const repeat = async (work: (n: number) => Promise<void>, from: number, step: number): Promise<void> => {
    for (let n = from; !ending.signal.aborted; n += step) {
      await work(n);
      await sleep(betweenMs);
    }
  };
  const workers = [0, 1, 2, 3].map((from) => repeat(command, from, 4));
  const all = Promise.all([...workers, repeat(batch, 0, 1), repeat(key, 0, 1)]);
  // stop() awaits these promises and throws their errors.
  all.catch(() => {});
  load.stop = async (settleMs) => {
    const until = Date.now() + settleMs;
    ending.abort();
    await all;
    for (;;) {
      const open = await Promise.all(
        ['queued', 'running'].map(async (status) =>
          itemsOf(await get(settings, `/commands?status=${status}`)),
        ),
      );
      if (open.flat().length === 0) break;
      if (Date.now() > until)
        throw new Error(`commands do not end: ${JSON.stringify(open.flat().slice(0, 3))}`);
      await sleep(1_000);
    }
    await following;
    // The follower gets 3 s to read the last events.
    const last = new AbortController();
    const rest = follow(settings, load.events, last.signal);
    await sleep(3_000);
    last.abort();
    await rest;
  };
  return load;
}

/** Checks the promises of the brokers. Returns a message for each broken promise. */
export async function checkAll(load: Load, services: CheckServices): Promise<string[]> {
  const { query, print } = services;
  const lines = existsSync(load.counter) ? readFileSync(load.counter, 'utf8').trim().split('\n') : [];
  const failures = [
    ...(await checkCommands(load, lines, query)),
    ...(await checkKeys(load, query)),
    ...(await checkSchedules(query)),
    ...(await checkEvents(load, query)),
    ...(await checkDeliveries(services)),
  ];
  const { commands, batches, keys, events, repeats } = load;
  print(
    `  ${commands.size} commands, ${batches.size} batches, ${lines.length} runs, ${keys.length} keys, ${events.length} events, ${services.delivered.length} deliveries, ${repeats} requests repeated: ${failures.length} failed`,
  );
  return failures;
}

type Query = CheckServices['query'];

async function checkCommands(
  { commands, batches, machines }: Load,
  lines: string[],
  query: Query,
): Promise<string[]> {
  const runs = Map.groupBy(lines, (line) => line);
  const failures: string[] = [];
  const stored = new Map(
    (await query('SELECT id, status FROM commands')).map((row) => [String(row.id), String(row.status)]),
  );
  for (const [id, marker] of commands) {
    const count = runs.get(marker)?.length ?? 0;
    if (count > 1) failures.push(`command ${id} ran ${count} times`);
    if (!stored.has(id)) failures.push(`command ${id} was answered and is lost`);
    if (count === 0 && stored.get(id) === 'completed')
      failures.push(`command ${id} is completed and never ran`);
    if (stored.get(id) !== 'completed')
      failures.push(`command ${id} ended as ${stored.get(id) ?? 'nothing'}, ran ${count} times`);
  }
  for (const [id, marker] of batches) {
    const count = runs.get(marker)?.length ?? 0;
    if (count !== machines.length)
      failures.push(`batch ${id} ran ${count} times on ${machines.length} machines`);
  }
  const known = new Set([...commands.values(), ...batches.values()]);
  for (const [marker, { length }] of runs)
    if (!known.has(marker) || (marker.startsWith('command') && length > 1))
      failures.push(`${marker} ran ${length} times`);
  return failures;
}

async function checkKeys({ keys }: Load, query: Query): Promise<string[]> {
  const rows = await query(
    "SELECT document::json ->> 'name' AS name FROM documents WHERE collection = 'keys'",
  );
  const names = Map.groupBy(rows, ({ name }) => String(name));
  return keys.flatMap((name) => {
    const count = names.get(name)?.length ?? 0;
    return count === 1 ? [] : [`key ${name} was answered and exists ${count} times`];
  });
}

/** Checks that each minute from a schedule's first run to its last run has one row. */
async function checkSchedules(query: Query): Promise<string[]> {
  const rows = await query(
    `SELECT schedule_id, scheduled_for, count(*) AS n FROM schedule_runs WHERE scheduled_for IS NOT NULL
     GROUP BY schedule_id, scheduled_for ORDER BY schedule_id, scheduled_for`,
  );
  const failures = rows.flatMap((row) =>
    Number(row.n) === 1
      ? []
      : [`schedule ${String(row.schedule_id)} has ${Number(row.n)} rows for ${Number(row.scheduled_for)}`],
  );
  for (const [id, times] of Map.groupBy(rows, (row) => String(row.schedule_id))) {
    const at = times.map((row) => Number(row.scheduled_for) / 60_000);
    const missing = (at.at(-1) ?? 0) - (at[0] ?? 0) + 1 - at.length;
    if (missing !== 0) failures.push(`schedule ${id} lacks ${missing} rows`);
  }
  return failures;
}

async function checkEvents({ events }: Load, query: Query): Promise<string[]> {
  const [first] = events;
  if (first === undefined) return ['the follower got no events'];
  const rows = await query(
    `SELECT id FROM events WHERE seq >= (SELECT seq FROM events WHERE id = '${first}') ORDER BY seq`,
  );
  const stored = rows.map(({ id }) => String(id));
  if (new Set(events).size !== events.length) return ['the follower got an event twice'];
  const lost = stored.slice(0, stored.indexOf(events.at(-1) ?? '') + 1).filter((id) => !events.includes(id));
  if (lost.length > 0) return [`the follower did not get ${lost.length} events, such as ${lost[0]}`];
  const wrong = events.findIndex((id, n) => id !== stored[n]);
  return wrong < 0 ? [] : [`event ${events[wrong]} came out of order`];
}

async function checkDeliveries({ query, delivered, settleMs }: CheckServices): Promise<string[]> {
  for (const until = Date.now() + settleMs; ; await sleep(1_000)) {
    const rows = await query("SELECT id FROM events WHERE type = 'command.completed'");
    const got = new Set(delivered);
    const missing = rows.filter(({ id }) => !got.has(String(id)));
    if (missing.length === 0) return [];
    if (Date.now() > until) return [`${missing.length} of ${rows.length} events were not delivered`];
  }
}

// Checks after a soak run that the brokers kept these promises:
// - No command ran twice.
// - No change is lost that a broker has confirmed.
// - Each due time of a schedule has exactly one row.
// - The client that follows the events got each event once and in order.
// - The webhook got each event of a completed command.
import { existsSync, readFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import type { FleetOfAgents } from '../bench/fleet/fleet-of-agents.ts';
import type { Load } from './mixed-load.ts';

type Query = (sql: string) => Promise<Record<string, unknown>[]>;

interface CheckServices {
  query: Query;
  fleet: FleetOfAgents | undefined;
  /** Ids of the events that the receiver of webhooks got. */
  delivered: readonly string[];
  /** Longest time in milliseconds to wait for the deliveries. */
  settleMs: number;
  print(line: string): void;
}

/**
 * Milliseconds after the end of the load within which the last runs of the schedules must be stored in schedule_runs.
 */
const schedulesLateMs = 5_000;

/** Returns a message for each promise, as listed at the top of this file, that a broker did not keep. */
export async function checkAll(load: Load, services: CheckServices): Promise<string[]> {
  const { query, print, fleet } = services;
  const lines = existsSync(load.counter) ? readFileSync(load.counter, 'utf8').trim().split('\n') : [];
  const failures = [
    ...(await checkCommands(load, lines, query)),
    ...(await checkSimulated(load, fleet, query)),
    ...(await checkKeys(load, query)),
    ...(await checkSchedules(load, query)),
    ...(await checkEvents(load, query)),
    ...(await checkDeliveries(services)),
  ];
  const { commands, batches, keys, events, repeats, simulatedCommands, simulatedBatches } = load;
  const [runs] = await query('SELECT count(*) AS n FROM schedule_runs');
  print(
    `  real: ${commands.size} commands, ${batches.size} batches, ${lines.length} runs; simulated: ${simulatedCommands.length} commands, ${simulatedBatches.size} batches, ${fleet?.counts().runs ?? 0} runs`,
  );
  print(
    `  ${keys.length} API keys created, ${Number(runs?.n)} due times of schedules, ${events.length} events, ${services.delivered.length} deliveries, ${repeats} requests repeated`,
  );
  return failures;
}

/** Returns the status of each command, with the reason of its end if there is one. */
async function statusesOf(query: Query): Promise<Map<string, string>> {
  const rows = await query("SELECT id, concat_ws(': ', status, reason) AS status FROM commands");
  return new Map(rows.map((row) => [String(row.id), String(row.status)]));
}

async function checkCommands(
  { commands, batches, real }: Load,
  lines: string[],
  query: Query,
): Promise<string[]> {
  const runs = Map.groupBy(lines, (line) => line);
  const failures: string[] = [];
  const stored = await statusesOf(query);
  for (const [id, marker] of commands) {
    const count = runs.get(marker)?.length ?? 0;
    if (count > 1) failures.push(`command ${id} ran ${count} times`);
    if (!stored.has(id)) failures.push(`command ${id} was answered, but has no row in the database`);
    if (count === 0 && stored.get(id) === 'completed')
      failures.push(`command ${id} has the status completed, but did not run`);
    if (stored.get(id) !== 'completed')
      failures.push(`command ${id} ran ${count} times, but its status is ${stored.get(id) ?? 'missing'}`);
  }
  for (const [id, marker] of batches) {
    const count = runs.get(marker)?.length ?? 0;
    if (count !== real.length)
      failures.push(`batch ${id} ran ${count} times, instead of once on each of ${real.length} machines`);
  }
  const known = new Set([...commands.values(), ...batches.values()]);
  for (const [marker, { length }] of runs)
    if (!known.has(marker) || (marker.startsWith('command') && length > 1))
      failures.push(`${marker} ran ${length} times`);
  return failures;
}

async function checkSimulated(
  { simulatedCommands, simulatedBatches }: Load,
  fleet: FleetOfAgents | undefined,
  query: Query,
): Promise<string[]> {
  if (!fleet) return [];
  const stored = await statusesOf(query);
  const failures = simulatedCommands
    .filter((id) => stored.get(id) !== 'completed')
    .map(
      (id) =>
        `command ${id} of a simulated machine must be completed, but is ${stored.get(id) ?? 'not stored'}`,
    );
  const { runs, runsTwice } = fleet.counts();
  if (runsTwice > 0) failures.push(`${runsTwice} of ${runs} commands of simulated machines ran twice`);
  const rows = await query(
    "SELECT batch_id, count(*) AS n FROM commands WHERE status = 'completed' GROUP BY batch_id",
  );
  const completed = new Map(rows.map((row) => [String(row.batch_id), Number(row.n)]));
  for (const [id, size] of simulatedBatches)
    if (completed.get(id) !== size)
      failures.push(
        `batch ${id} has ${size} simulated machines, but ${completed.get(id) ?? 0} completed commands`,
      );
  return failures;
}

async function checkKeys({ keys }: Load, query: Query): Promise<string[]> {
  const rows = await query(
    "SELECT document::json ->> 'name' AS name FROM documents WHERE collection = 'keys'",
  );
  const names = Map.groupBy(rows, ({ name }) => String(name));
  return keys.flatMap((name) => {
    const count = names.get(name)?.length ?? 0;
    return count === 1 ? [] : [`the creation of key ${name} was answered, but ${count} keys have this name`];
  });
}

/** Checks that a schedule has one row for each due time between its creation and the end of the load. */
async function checkSchedules({ schedules, endedAt }: Load, query: Query): Promise<string[]> {
  await sleep(Math.max(0, endedAt + schedulesLateMs - Date.now()));
  const rows = await query(
    'SELECT schedule_id, scheduled_for, status FROM schedule_runs WHERE scheduled_for IS NOT NULL',
  );
  const times = Map.groupBy(rows, (row) => `${String(row.schedule_id)} ${Number(row.scheduled_for)}`);
  const failures = [...times].flatMap(([time, { length }]) =>
    length === 1 ? [] : [`there are ${length} runs instead of one for the schedule and due time ${time}`],
  );
  for (const { id, everyMs, createdAt } of schedules) {
    const missing: string[] = [];
    // Due times in the first second are not checked, because they may have passed before the broker stored the
    // schedule.
    for (let at = Math.ceil((createdAt + 1_000) / everyMs) * everyMs; at <= endedAt; at += everyMs)
      if (!times.has(`${id} ${at}`)) missing.push(new Date(at).toISOString());
    if (missing.length > 0)
      failures.push(`schedule ${id} has no row for ${missing.length} due times, such as ${missing[0]}`);
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
  const got = new Set(events);
  if (got.size !== events.length) return ['the follower got an event twice'];
  const lost = stored.slice(0, stored.indexOf(events.at(-1) ?? '') + 1).filter((id) => !got.has(id));
  if (lost.length > 0) return [`the follower did not get ${lost.length} events, such as ${lost[0]}`];
  const wrong = events.findIndex((id, n) => id !== stored[n]);
  return wrong < 0 ? [] : [`event ${events[wrong]} came out of order`];
}

async function checkDeliveries({ query, delivered, settleMs }: CheckServices): Promise<string[]> {
  // Schedules still run and cause events, so only the events up to now count.
  const rows = await query("SELECT id FROM events WHERE type = 'command.completed'");
  for (const until = Date.now() + settleMs; ; await sleep(1_000)) {
    const got = new Set(delivered);
    const missing = rows.filter(({ id }) => !got.has(String(id)));
    if (missing.length === 0) return [];
    if (Date.now() > until) return [`${missing.length} of ${rows.length} events were not delivered`];
  }
}

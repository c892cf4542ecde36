// Measures how long each agent of a lost broker has no link: until it is linked to another broker, or to the same
// broker after a restart.
import { setTimeout as sleep } from 'node:timers/promises';
import { Client } from 'pg';
import { at } from '../bench/start-and-measure-programs.ts';
import type { PostgresServer } from './postgres-server.ts';

const pollMs = 200;

/** The milliseconds without a link, for each machine that lost its link and got another one. */
export interface Relinks {
  real: number[];
  simulated: number[];
  /** Number of machines without a link at the end of the measurement. */
  missing: number;
}

const linkedWith = `SELECT o.machine_id, b.id FROM owners o JOIN brokers b ON b.id = o.broker_id
  WHERE b.url = $1 AND b.lease_until > clock_timestamp() AND o.link_id IS NOT NULL`;
const linkedElsewhere = `SELECT machine_id FROM owners
  WHERE machine_id = ANY($1::varchar[]) AND broker_id <> $2 AND link_id IS NOT NULL`;

/**
 * Calls `lose`, which makes the machines of the broker at `peer` lose their links. Measures how long each machine takes
 * to be linked again, to another broker or to the same one after a restart. Stops after `mostMs` milliseconds.
 */
export async function measureRelinks(
  postgres: PostgresServer,
  { peer, real, mostMs }: { peer: string; real: readonly string[]; mostMs: number },
  lose: () => void,
): Promise<Relinks> {
  const rows = await postgres.query(linkedWith, [`https://${peer}`]);
  const left = new Set(rows.map(({ machine_id }) => String(machine_id)));
  const relinks: Relinks = { real: [], simulated: [], missing: 0 };
  const client = new Client(postgres.urlAt(postgres.address));
  client.on('error', () => {});
  await client.connect();
  lose();
  const lost = performance.now();
  while (left.size > 0 && performance.now() - lost < mostMs) {
    await sleep(pollMs);
    const found = await client.query<{ machine_id: string }>(linkedElsewhere, [[...left], rows[0]?.id]);
    const ms = performance.now() - lost;
    for (const { machine_id } of found.rows) {
      left.delete(machine_id);
      relinks[real.includes(machine_id) ? 'real' : 'simulated'].push(ms);
    }
  }
  await client.end();
  relinks.missing = left.size;
  return relinks;
}

/**
 * Prints how long agents were without a link. Returns a message for each failure: a p99 above `mostMs` milliseconds, or
 * agents that still have no link.
 */
export function checkRelinks(
  all: readonly Relinks[],
  mostMs: number,
  print: (line: string) => void,
): string[] {
  const failures: string[] = [];
  for (const kind of ['real', 'simulated'] as const) {
    const times = all.flatMap((relinks) => relinks[kind]).sort((a, b) => a - b);
    if (times.length === 0) continue;
    const [p50, p99, most] = [at(times, 0.5), at(times, 0.99), times.at(-1) ?? 0].map(Math.round);
    print(
      `  ${times.length} links of ${kind} agents lost: back after ${p50} ms (p50), ${p99} (p99), ${most} (most)`,
    );
    if ((p99 ?? 0) > mostMs)
      failures.push(
        `99 % of the ${kind} agents had a link again only after ${p99} ms, the limit is ${mostMs} ms`,
      );
  }
  const missing = all.reduce((sum, relinks) => sum + relinks.missing, 0);
  if (missing > 0) failures.push(`${missing} agents that lost their link are still without one`);
  return failures;
}

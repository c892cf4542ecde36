// The steps of the soak test that freezes and cuts brokers. Each step returns a message for each failed check.
import { setTimeout as sleep } from 'node:timers/promises';
import { checkRelinks, measureRelinks } from './measure-relinks.ts';
import type { Row } from './postgres-server.ts';
import type { SoakBroker, System } from './three-brokers.ts';

type Print = (line: string) => void;
type Step = (system: System, print: Print) => Promise<string[]>;

/** Milliseconds within which the agents of a lost or frozen broker must be linked to another one. */
const vanishedMs = 75_000;
const frozenMs = 60_000;
/**
 * Milliseconds within which agents must be linked to another broker after their broker has lost its connection to the
 * database.
 */
const handedOverMs = 20_000;
/**
 * Duration of a broker's lease in the database, in milliseconds. After this time without the database, a broker must
 * not answer any request with success.
 */
const leaseMs = 10_000;
const cutMs = 40_000;
const peersCutMs = 30_000;
/** A request that must be forwarded to an unreachable broker must get 503 within this number of milliseconds. */
const unreachableMs = 15_000;
const databaseAwayMs = 10_000;
/** After the end of a fault, everything must work again within this number of milliseconds. */
const backMs = 5_000;
/** Milliseconds for which a broker may still accept a key that was revoked at another broker. */
const revokedMs = 1_000;
/** Milliseconds for which a broker may still accept a revoked key while it gets no notifications from the database. */
const revokedWithoutNewsMs = 5_000;
const revocations = 20;

export const steps: Readonly<Record<string, Step>> = {
  vanish,
  freeze,
  'cut-from-database': cutFromDatabase,
  'cut-from-peers': cutFromPeers,
  'restart-database': restartDatabase,
  revoke,
};

interface Reply {
  status: number;
  ms: number;
  text: string;
}

/** Sends one request to this broker. The status is 0 if there is no answer. */
async function ask(
  broker: SoakBroker,
  key: string,
  method: string,
  path: string,
  body?: object,
  mostMs: number = backMs,
): Promise<Reply> {
  const begun = performance.now();
  try {
    const answer = await fetch(`http://${broker.http}/api/v1${path}`, {
      method,
      headers: { Authorization: `Bearer ${key}`, 'Content-Type': 'application/json', Connection: 'close' },
      ...(body && { body: JSON.stringify(body) }),
      signal: AbortSignal.timeout(mostMs),
    });
    const text = await answer.text();
    return { status: answer.status, ms: performance.now() - begun, text };
  } catch (error) {
    return { status: 0, ms: performance.now() - begun, text: String(error) };
  }
}

const createKey = ({ key }: System, broker: SoakBroker): Promise<Reply> =>
  ask(broker, key, 'POST', '/api-keys', { name: 'step', scopes: ['machines:read'] });

const runOn = ({ key }: System, broker: SoakBroker, machine_id: string, mostMs?: number): Promise<Reply> =>
  ask(broker, key, 'POST', '/commands/async', { machine_id, command: 'true', queue_for: 60_000 }, mostMs);

/** Sends a request until its status is 2xx. Returns the milliseconds that this took. */
async function untilSuccess(send: () => Promise<Reply>, mostMs = 60_000): Promise<number> {
  const begun = performance.now();
  for (;;) {
    const { status, text } = await send();
    const ms = performance.now() - begun;
    if (status >= 200 && status < 300) return ms;
    if (ms > mostMs) throw new Error(`a request still fails after ${Math.round(ms)} ms: ${status} ${text}`);
    await sleep(50);
  }
}

/** Returns the machines with real agents that are linked with this broker. */
async function machinesOf({ postgres, real }: System, { peer }: SoakBroker): Promise<string[]> {
  const rows = await postgres.query(
    `SELECT machine_id FROM owners o JOIN brokers b ON b.id = o.broker_id
     WHERE b.url = $1 AND o.link_id IS NOT NULL AND machine_id = ANY($2::varchar[])`,
    [`https://${peer}`, real],
  );
  return rows.map(({ machine_id }) => String(machine_id));
}

/** Returns the broker with the most machines of real agents, one of these machines, and another broker. */
async function brokersOf(system: System) {
  const found = await Promise.all(
    system.brokers.map(async (broker) => ({ broker, machines: await machinesOf(system, broker) })),
  );
  const [first, second] = found.sort((a, b) => b.machines.length - a.machines.length);
  const machine = first?.machines[0];
  if (!first || !second || !machine)
    throw new Error('this step needs two brokers, and a machine that is linked to one of them');
  return { broker: first.broker, other: second.broker, machine };
}

const finished = `SELECT id, status, exit_code, finished_at FROM commands
  WHERE finished_at IS NOT NULL ORDER BY id`;

/** Returns the rows of `before` that have changed or no longer exist, as JSON. */
function changedRows(before: readonly Row[], after: readonly Row[]): string[] {
  const texts = new Set(after.map((row) => JSON.stringify(row)));
  return before.map((row) => JSON.stringify(row)).filter((text) => !texts.has(text));
}

/** Cuts a broker from its agents, the other brokers and the database, as if its host had lost the network. */
async function vanish(system: System, print: Print): Promise<string[]> {
  const { postgres, real, proxy } = system;
  const { broker, machine } = await brokersOf(system);
  const { peer, proxies, http } = broker;
  const all = Object.values(proxies ?? {});
  const relinks = await measureRelinks(postgres, { peer, real, mostMs: 2 * vanishedMs }, () => {
    proxy.leave(http);
    for (const one of all) one.stall();
  });
  for (const one of all) one.resume();
  const ms = await untilSuccess(() => runOn(system, broker, machine));
  proxy.use(http);
  print(
    `  ${Math.round(ms)} ms after the broker had its network back, it forwarded a command to the broker that has taken over the machine`,
  );
  return checkRelinks([relinks], vanishedMs, print);
}

async function freeze(system: System, print: Print): Promise<string[]> {
  const { postgres, real } = system;
  const { broker, machine } = await brokersOf(system);
  const begun = performance.now();
  const relinks = await measureRelinks(postgres, { peer: broker.peer, real, mostMs: vanishedMs }, () =>
    broker.signal('SIGSTOP'),
  );
  await sleep(Math.max(0, frozenMs - (performance.now() - begun)));
  const before = await postgres.query(finished);
  broker.signal('SIGCONT');
  const ms = await untilSuccess(() => runOn(system, broker, machine));
  await sleep(2 * backMs);
  const changed = changedRows(before, await postgres.query(finished));
  print(
    `  a broker frozen for ${frozenMs} ms: forwards requests again ${Math.round(ms)} ms after the freeze; of ${before.length} commands that had ended, the rows of ${changed.length} were changed`,
  );
  return [
    ...checkRelinks([relinks], vanishedMs, print),
    ...(changed.length === 0
      ? []
      : [`the rows of commands that had already ended were changed, such as ${changed[0]}`]),
  ];
}

async function cutFromDatabase(system: System, print: Print): Promise<string[]> {
  const { postgres, real } = system;
  const { broker, other, machine } = await brokersOf(system);
  const failures: string[] = [];
  const lost = Promise.withResolvers<void>();
  const measuring = measureRelinks(postgres, { peer: broker.peer, real, mostMs: cutMs }, () => {
    broker.proxies?.database.stall();
    lost.resolve();
  });
  await lost.promise;
  const cut = performance.now();
  let lastSuccess = 0;
  let firstElsewhere = 0;
  while (performance.now() - cut < cutMs) {
    const [here, elsewhere] = await Promise.all([
      runOn(system, broker, machine),
      runOn(system, other, machine),
    ]);
    const ms = performance.now() - cut;
    if (here.status < 300 && here.status > 0) lastSuccess = ms;
    if (elsewhere.status < 300 && elsewhere.status > 0 && firstElsewhere === 0) firstElsewhere = ms;
    if (here.status > 300 && here.status !== 503)
      failures.push(
        `a broker cut from the database must answer 503, but answered ${here.status} ${here.text}`,
      );
    await sleep(250);
  }
  const relinks = await measuring;
  broker.proxies?.database.resume();
  const ms = await untilSuccess(() => createKey(system, broker));
  const relinked = await untilSuccess(() =>
    ask(other, system.key, 'GET', `/machines/${machine}/files/stat?path=/etc`),
  );
  print(
    `  a broker cut from the database for ${cutMs} ms: its last success ${Math.round(lastSuccess)} ms after the cut; first success for the same machine at another broker after ${Math.round(firstElsewhere)} ms`,
  );
  print(
    `  after the cut: the broker accepts changes again after ${Math.round(ms)} ms; another broker reaches the machine ${Math.round(relinked)} ms later`,
  );
  if (lastSuccess > leaseMs) failures.push('a broker without the database has answered with success');
  if (firstElsewhere === 0) failures.push('no other broker has claimed the machine');
  if (ms > backMs) failures.push(`the broker was back only after ${Math.round(ms)} ms`);
  return [...failures, ...checkRelinks([relinks], handedOverMs, print)];
}

async function cutFromPeers(system: System, print: Print): Promise<string[]> {
  const { postgres, brokers } = system;
  const { broker, other, machine } = await brokersOf(system);
  const owners = 'SELECT machine_id, broker_id, epoch FROM owners ORDER BY machine_id';
  const before = await postgres.query(owners);
  for (const { proxies } of brokers) proxies?.peer.stall();
  await sleep(2_000);
  const failures: string[] = [];
  const cut = performance.now();
  let longest = 0;
  while (performance.now() - cut < peersCutMs) {
    const [near, far] = await Promise.all([
      runOn(system, broker, machine),
      runOn(system, other, machine, unreachableMs),
    ]);
    if (near.status !== 201)
      failures.push(
        `the broker that owns the machine must run its commands while cut off from the other brokers, but answered ${near.status} ${near.text}`,
      );
    if (far.status !== 503)
      failures.push(
        `a broker that cannot reach the broker that owns the machine must answer 503, but answered ${far.status} ${far.text}`,
      );
    longest = Math.max(longest, far.ms);
    await sleep(500);
  }
  const changed = changedRows(before, await postgres.query(owners));
  for (const { proxies } of brokers) proxies?.peer.resume();
  const ms = await untilSuccess(() => runOn(system, other, machine));
  print(
    `  brokers cut from each other for ${peersCutMs} ms: 503 after at most ${Math.round(longest)} ms, ${changed.length} owners changed; back after ${Math.round(ms)} ms`,
  );
  if (changed.length > 0)
    failures.push(
      `${changed.length} machines got another broker as owner, although every broker could still reach the database`,
    );
  if (ms > backMs)
    failures.push(
      `a broker forwarded requests again only ${Math.round(ms)} ms after the cut had ended, the limit is ${backMs} ms`,
    );
  return failures.slice(0, 5);
}

async function restartDatabase(system: System, print: Print): Promise<string[]> {
  const { postgres, brokers, fleet } = system;
  const links = 'SELECT machine_id, broker_id, epoch, link_id FROM owners ORDER BY machine_id';
  const before = await postgres.query(links);
  const welcomes = fleet?.counts().welcomes;
  const failures: string[] = [];
  await postgres.kill();
  const killed = performance.now();
  while (performance.now() - killed < databaseAwayMs) {
    for (const { status, text } of await Promise.all(brokers.map((one) => createKey(system, one))))
      if (status !== 503)
        failures.push(`a broker must answer 503 while PostgreSQL is away, but answered ${status} ${text}`);
    await sleep(500);
  }
  await postgres.start();
  const times = await Promise.all(brokers.map((one) => untilSuccess(() => createKey(system, one))));
  await sleep(2 * leaseMs);
  const changed = changedRows(before, await postgres.query(links));
  const again = (fleet?.counts().welcomes ?? 0) - (welcomes ?? 0);
  print(
    `  PostgreSQL killed with kill -9 and away for ${databaseAwayMs} ms: all brokers serve again ${Math.round(Math.max(...times))} ms after its return; ${changed.length} links changed, ${again} simulated agents linked again`,
  );
  if (Math.max(...times) > backMs) failures.push(`not all brokers served again within ${backMs} ms`);
  if (changed.length > 0)
    failures.push(`${changed.length} of ${before.length} links changed, such as ${changed[0]}`);
  return failures.slice(0, 5);
}

/** Returns the longest time in milliseconds for which any broker accepted a key after it was revoked. */
async function revokeOnce(system: System, round: number): Promise<number> {
  const { brokers } = system;
  const at = brokers[round % brokers.length];
  if (!at) throw new Error('there are no brokers');
  const made = await createKey(system, at);
  const { data } = JSON.parse(made.text) as { data?: { id: string; key: string } };
  if (!data) throw new Error(`no key was created: ${made.text}`);
  // The key is tried at each broker, with a request about one of its own machines. A list would not measure the delay:
  // before a broker answers a list, it reads all changes, and so also the revocation.
  const own = await Promise.all(brokers.map((broker) => machinesOf(system, broker)));
  const looks = brokers.flatMap((broker, n) => {
    const [machine] = own[n] ?? [];
    return machine === undefined
      ? []
      : [{ broker, look: () => ask(broker, data.key, 'GET', `/machines/${machine}`) }];
  });
  if (looks.length < 2) throw new Error('fewer than two brokers have machines');
  await Promise.all(looks.map(({ look }) => untilSuccess(look)));
  const removed = await ask(at, system.key, 'DELETE', `/api-keys/${data.id}`);
  if (removed.status >= 300) throw new Error(`the key was not revoked: ${removed.text}`);
  const revoked = performance.now();
  const times = looks.map(async ({ broker, look }) => {
    for (let accepted = 0; ; await sleep(10)) {
      const sent = performance.now() - revoked;
      const { status } = await look();
      if (status >= 300) return accepted;
      if (sent > 30_000) throw new Error(`${broker.name} still accepts a revoked key after 30 s`);
      accepted = sent;
    }
  });
  return Math.max(...(await Promise.all(times)));
}

/** Returns the process ids of PostgreSQL for the connections on which brokers wait for notifications. */
async function listeners({ postgres, brokers }: System): Promise<number[]> {
  const found = new Set<number>();
  for (let tries = 0; found.size < brokers.length && tries < 100; tries += 1) {
    const rows = await postgres.query(
      "SELECT pid FROM pg_stat_activity WHERE query LIKE 'SELECT machine_id, broker_id%FROM owners%'",
    );
    for (const { pid } of rows) found.add(Number(pid));
    await sleep(50);
  }
  return [...found];
}

async function revoke(system: System, print: Print): Promise<string[]> {
  const times: number[] = [];
  for (let round = 0; round < revocations; round += 1) times.push(await revokeOnce(system, round));
  const most = Math.round(Math.max(...times));
  const pids = await listeners(system);
  for (const pid of pids) process.kill(pid, 'SIGSTOP');
  const deaf = Math.round(
    await revokeOnce(system, 0).finally(() => {
      for (const pid of pids) process.kill(pid, 'SIGCONT');
    }),
  );
  print(
    `  ${revocations} revoked keys were accepted for at most ${most} ms; another was accepted for ${deaf} ms while the brokers got no notifications from the database (${pids.length} connections stopped)`,
  );
  const failures: string[] = [];
  if (most > revokedMs) failures.push(`a key was accepted for ${most} ms after it was revoked`);
  if (deaf > revokedWithoutNewsMs)
    failures.push(
      `a broker that got no notifications from the database accepted a key for ${deaf} ms after the key was revoked`,
    );
  return failures;
}

// Stops and starts each of three brokers in turn under load, as an upgrade does. Checks that every request which may be
// repeated succeeds, and that no command runs twice.
//
//   npx node scripts/soak/rolling-restart.ts --rounds 2 --out scripts/soak/results/rolling-restart.txt
//   npx node scripts/soak/rolling-restart.ts --from OLD --to NEW     directories of two checkouts
//
// Needs Debian's package postgresql.
import { appendFileSync, existsSync, mkdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { Farhand } from '../../shared/sdk/index.ts';
import { bench } from '../bench/start-and-measure-programs.ts';
import { type SoakBroker, type System, startSystem } from './three-brokers.ts';

const { values } = parseArgs({
  options: {
    rounds: { type: 'string', default: '2' },
    agents: { type: 'string', default: '6' },
    clients: { type: 'string', default: '8' },
    retries: { type: 'string', default: '2' },
    from: { type: 'string' },
    to: { type: 'string' },
    out: { type: 'string' },
  },
});

/** Milliseconds between the start of one broker and the stop of the next one. */
const betweenMs = 5_000;
/** Longest time that a broker may take to stop, in milliseconds. */
const stopMs = 20_000;
/** Longest time to wait until all commands have ended, in milliseconds. */
const settleMs = 60_000;
/** Maximum number of retries of one request in #readMachine(). */
const mostRetries = 6;

interface Count {
  sent: number;
  repeated: number;
  failures: string[];
}

/** Sends requests one after another until `signal` fires. */
class Client {
  readonly #system: System;
  readonly #counts: Map<string, Count>;
  /** The file to which each command appends a line, the command's marker. */
  readonly #counter: string;
  readonly #sdk: Farhand;
  /** How often the SDK has sent the present request. */
  #attempts = 0;
  /**
   * Markers of the commands that a broker has accepted. At the end, each marker must be in the file `counter` exactly
   * once.
   */
  readonly markers: string[] = [];

  constructor(system: System, counts: Map<string, Count>, counter: string) {
    this.#system = system;
    this.#counts = counts;
    this.#counter = counter;
    const counted: typeof fetch = (...request) => {
      this.#attempts += 1;
      return fetch(...request);
    };
    const retries = Number(values.retries);
    this.#sdk = new Farhand({ baseUrl: system.proxy.url, apiKey: system.key, retries, fetch: counted });
  }

  async run(nth: number, signal: AbortSignal): Promise<void> {
    const { real } = this.#system;
    for (let n = nth; !signal.aborted; n += 1) {
      const machine_id = real[n % real.length] ?? '';
      const marker = `marker-${nth}-${n}`;
      const command = `echo ${marker} >>${this.#counter}`;
      await this.#send('POST /commands with queue_for', async () => {
        // The answer may come before the command has ended, because a broker that stops does not wait for the end.
        await this.#sdk.commands.create({ machine_id, command, queue_for: 60_000, wait: 10_000 });
        this.markers.push(marker);
      });
      await this.#send('GET /machines', () => this.#sdk.machines.list());
      await this.#send('GET /commands', () => this.#sdk.commands.list({ machine_id, limit: 10 }));
      const saved: string[] = [];
      await this.#send('POST /saved-commands', async () => {
        saved.push((await this.#sdk.savedCommands.create({ name: marker, argv: ['true'] })).id);
      });
      // Removes the saved commands, because a broker stores at most 1,000. A failed removal does not matter: it leaves
      // only one more.
      for (const saved_command_id of saved)
        await this.#sdk.savedCommands.remove({ saved_command_id }).catch(() => undefined);
      await this.#readMachine(machine_id);
    }
  }

  async #send(kind: string, call: () => Promise<unknown>): Promise<void> {
    const count = this.#countOf(kind);
    this.#attempts = 0;
    count.sent += 1;
    await call().catch((error: unknown) => count.failures.push(String(error)));
    count.repeated += Math.max(0, this.#attempts - 1);
  }

  /**
   * Reads the metadata of /etc on a machine. Repeats the request after a 503 or a lost connection. Uses fetch, because
   * the SDK does not repeat a request about an offline machine.
   */
  async #readMachine(machine_id: string): Promise<void> {
    const count = this.#countOf('GET /machines/{id}/files/stat');
    const url = `${this.#system.proxy.url}/api/v1/machines/${machine_id}/files/stat?path=/etc`;
    count.sent += 1;
    for (let retries = 0; ; retries += 1) {
      let failure: unknown;
      let waitMs = 1_000;
      try {
        const answer = await fetch(url, { headers: { Authorization: `Bearer ${this.#system.key}` } });
        failure = await answer.text();
        if (answer.ok) return;
        waitMs = 1_000 * Number(answer.headers.get('retry-after') ?? 1);
        if (answer.status !== 503) retries = mostRetries;
      } catch (error) {
        failure = error;
      }
      if (retries >= mostRetries) return void count.failures.push(String(failure));
      count.repeated += 1;
      await sleep(waitMs);
    }
  }

  #countOf(kind: string): Count {
    const count = this.#counts.get(kind) ?? { sent: 0, repeated: 0, failures: [] };
    this.#counts.set(kind, count);
    return count;
  }
}

/** Stops a broker with SIGTERM, as systemd does. Starts it again from `checkout`, by default from this repository. */
async function restart(broker: SoakBroker, checkout: string | undefined): Promise<void> {
  const { pid } = broker.running;
  broker.signal('SIGTERM');
  for (const until = Date.now() + stopMs; existsSync(`/proc/${pid}`); await sleep(50))
    if (Date.now() > until) throw new Error(`${broker.name} does not stop`);
  await broker.start(checkout);
}

async function untilAllEnded({ proxy, key }: System): Promise<void> {
  const client = new Farhand({ baseUrl: proxy.url, apiKey: key });
  for (const until = Date.now() + settleMs; ; await sleep(500)) {
    const open = ['queued' as const, 'running' as const].map((status) => client.commands.list({ status }));
    const count = (await Promise.all(open)).reduce((sum, { total }) => sum + total, 0);
    if (count === 0) return;
    if (Date.now() > until) throw new Error(`after ${settleMs / 1000} s, ${count} commands have not ended`);
  }
}

/** Returns a message for each command that did not run exactly once. */
function checkRuns(clients: readonly Client[], counter: string): string[] {
  const lines = existsSync(counter) ? readFileSync(counter, 'utf8').trim().split('\n') : [];
  const runs = Map.groupBy(lines, (line) => line);
  const twice = [...runs].filter(([, { length }]) => length > 1).map(([marker]) => `${marker} ran twice`);
  const answered = clients.flatMap(({ markers }) => markers);
  return [...twice, ...answered.filter((marker) => !runs.has(marker)).map((marker) => `${marker} never ran`)];
}

await bench(async (parent) => {
  const { from, to, out, rounds } = values;
  const print = (line: string): void => {
    console.log(line);
    if (out) appendFileSync(out, `${line}\n`);
  };
  const folder = join(parent, 'soak');
  mkdirSync(folder);
  const system = await startSystem({
    ...{ folder, agents: Number(values.agents), simulated: 0, hasProxies: false, checkout: from },
  });
  const counter = join(folder, 'counter');
  const counts = new Map<string, Count>();
  const ending = new AbortController();
  try {
    const clients = Array.from({ length: Number(values.clients) }, () => new Client(system, counts, counter));
    const running = Promise.all(clients.map((client, n) => client.run(n * 1_000_000, ending.signal)));
    for (let round = 0; round < Number(rounds); round += 1)
      for (const broker of system.brokers) {
        await sleep(betweenMs);
        const begun = performance.now();
        await restart(broker, to);
        print(
          `round ${round + 1}: ${broker.name} stopped and started in ${Math.round(performance.now() - begun)} ms`,
        );
      }
    await sleep(betweenMs);
    ending.abort();
    await running;
    await untilAllEnded(system);
    const failures = checkRuns(clients, counter);
    for (const [kind, { sent, repeated, failures: ofKind }] of counts) {
      print(`${kind}: ${sent} requests, ${repeated} sent again, ${ofKind.length} failed`);
      failures.push(...ofKind);
    }
    for (const failure of failures) print(`FAILED ${failure}`);
    if (failures.length > 0) throw new Error(`${failures.length} requests or commands failed`);
    print('no request failed, and no command ran twice');
  } finally {
    ending.abort();
    await system.close();
  }
});

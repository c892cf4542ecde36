// Starts, kills and restarts the measured broker. Measures its CPU, memory and disk writes, and profiles its main
// thread.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { connectionLimits } from '../../../broker/connection-limiter.ts';
import { cost, firstSecrets, privateMebibytes, until } from '../start-and-measure-programs.ts';

interface Parameters {
  dataDir: string;
  /** Number of machines that may join. */
  machines: number;
  /** Starts the broker so that profile() can take CPU profiles. */
  profiled?: boolean;
}

const program = join(import.meta.dirname, '../../../broker/main.ts');
const stopMs = 20_000;

export class BrokerProcess {
  readonly #parameters: Parameters;
  #pid = 0;
  #inspector: string | undefined;
  http = '';
  grpc = '';
  key = '';
  joinToken = '';

  static async start(parameters: Parameters): Promise<BrokerProcess> {
    const { machines } = parameters;
    if (connectionLimits().grpc.connections < machines)
      throw new Error(
        `the limit of open files is too low for a broker with ${machines} machines: run ulimit -n 20000 first`,
      );
    const broker = new BrokerProcess(parameters);
    await broker.restart();
    const { key, token } = await firstSecrets(parameters.dataDir, parameters.machines);
    broker.key = key;
    broker.joinToken = token;
    // Restarts the broker, because its first start takes extra memory, for example to create certificates. The
    // measurements must not include that memory.
    await broker.stop('SIGTERM');
    await broker.restart();
    return broker;
  }

  constructor(parameters: Parameters) {
    this.#parameters = parameters;
  }

  get isProfiled(): boolean {
    return this.#parameters.profiled === true;
  }

  get pid(): number {
    return this.#pid;
  }

  /** Starts the broker again, on the ports of its first start. Resolves when it serves requests. */
  async restart(): Promise<void> {
    const { dataDir, profiled } = this.#parameters;
    const http = this.http.replace('http://', '') || '127.0.0.1:0';
    const inspect = profiled ? ['--inspect=127.0.0.1:0'] : [];
    const flags = ['--data-dir', dataDir, '--http', http, '--grpc', this.grpc || '127.0.0.1:0'];
    const { pid, line } = await until(process.execPath, [...inspect, program, ...flags], (text) => {
      const [, address] = /^Debugger listening on (ws:\S+)/.exec(text) ?? [];
      if (address !== undefined) this.#inspector = address;
      const logged = text.startsWith('{') ? (JSON.parse(text) as Record<string, string>) : {};
      return logged.msg === 'broker is up' ? logged : undefined;
    });
    this.#pid = pid;
    this.http = line.http ?? '';
    this.grpc = line.grpc ?? '';
  }

  /** Sends a signal, and waits until the process has ended. */
  async stop(signal: 'SIGTERM' | 'SIGKILL'): Promise<void> {
    process.kill(this.#pid, signal);
    const end = performance.now() + stopMs;
    while (isAlive(this.#pid)) {
      if (performance.now() > end) throw new Error(`the broker did not end after ${signal}`);
      await sleep(10);
    }
  }

  /** Returns the MiB of memory that the broker shares with no other process. */
  memory(): number {
    return privateMebibytes(this.#pid);
  }

  /** Returns the CPU seconds that the broker has used so far. */
  cpu(): number {
    return cost(this.#pid).cpu;
  }

  /** Returns the bytes that the broker has caused to be written to disks so far (proc_pid_io(5)). */
  written(): number {
    return Number(/^write_bytes: (\d+)/m.exec(readFileSync(`/proc/${this.#pid}/io`, 'latin1'))?.[1]);
  }

  /**
   * Profiles the main thread while `work` runs. Returns the functions that took the most time, the longest first. Returns
   * none if the broker was started without `profiled`.
   */
  async profile(work: () => Promise<unknown>): Promise<string[]> {
    if (this.#inspector === undefined) {
      await work();
      return [];
    }
    const inspector = await connectInspector(this.#inspector);
    await inspector.call('Profiler.enable');
    await inspector.call('Profiler.start');
    await work();
    const { profile } = (await inspector.call('Profiler.stop')) as { profile: Profile };
    inspector.close();
    return topOf(profile);
  }
}

function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch {
    return false;
  }
}

/** The fields of the type Profiler.Profile (Chrome DevTools Protocol) that this bench uses. */
interface Profile {
  nodes: { id: number; callFrame: { functionName: string; url: string; lineNumber: number } }[];
  samples: number[];
}

const topFunctions = 5;

/** Returns the functions with the most samples, each with its share of all samples of JavaScript. */
function topOf({ nodes, samples }: Profile): string[] {
  const names = new Map(
    nodes.map(({ id, callFrame: { functionName, url, lineNumber } }) => {
      const file = url.replace(/^.*\/(?=(?:broker|shared|agent|node_modules)\/)/, '');
      return [id, `${functionName || '(anonymous)'}${file && ` ${file}:${lineNumber + 1}`}`];
    }),
  );
  const counts = new Map<string, number>();
  // Counts samples instead of adding their durations, because durations include time of other processes.
  for (const id of samples) {
    const name = names.get(id) ?? '';
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  // These entries are no functions: they stand for waiting, and for the work of Node's C++ code.
  for (const outside of ['(idle)', '(program)', '(root)']) counts.delete(outside);
  const all = [...counts.values()].reduce((sum, count) => sum + count, 0);
  return [...counts]
    .sort(([, a], [, b]) => b - a)
    .slice(0, topFunctions)
    .map(
      ([name, count]) =>
        `${((count / all) * 100).toFixed(1)} % ${name} (${count} of ${samples.length} samples)`,
    );
}

async function connectInspector(address: string) {
  const socket = new WebSocket(address);
  const waiting = new Map<number, { resolve(result: unknown): void; reject(error: Error): void }>();
  let calls = 0;
  socket.addEventListener('message', ({ data }) => {
    const { id, result } = JSON.parse(String(data)) as { id?: number; result?: unknown };
    if (id !== undefined) waiting.get(id)?.resolve(result);
  });
  socket.addEventListener('close', () => {
    for (const { reject } of waiting.values()) reject(new Error('the inspector closed the connection'));
  });
  await new Promise((resolve, reject) => {
    socket.addEventListener('open', resolve, { once: true });
    socket.addEventListener('error', () => reject(new Error('no connection to the inspector')), {
      once: true,
    });
  });
  return {
    call(method: string): Promise<unknown> {
      calls += 1;
      const { promise, resolve, reject } = Promise.withResolvers<unknown>();
      waiting.set(calls, { resolve, reject });
      socket.send(JSON.stringify({ id: calls, method }));
      return promise;
    },
    close: (): void => socket.close(),
  };
}

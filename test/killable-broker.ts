// Brokers that a test kills with kill -9 and starts again. Each runs in a separate process, with a clock that the test
// moves.
import { type ChildProcess, fork } from 'node:child_process';
import { once } from 'node:events';
import { join } from 'node:path';
import { onTestFinished } from 'vitest';
import { through } from '../broker/cli/pinned-transport.ts';
import type { Tuning } from '../broker/start/index.ts';
import { Farhand } from '../shared/sdk/index.ts';
import { freeAddress } from './find-free-ports.ts';
import type { BrokerProcessOptions } from './killable-broker-process.ts';
import { temporaryFolder } from './start-farhand.ts';
import { databaseFlags } from './start-postgres.ts';

export interface KillableBroker {
  dataDir: string;
  grpc: string;
  /** A client with all rights over the socket file. It can be used again after each start. */
  client: Farhand;
  joinToken(): Promise<string>;
  /**
   * Starts the broker. `alerts` sets the delays of its notifications. Before the start, its clock moves on by `passed`
   * milliseconds.
   */
  start(alerts?: Tuning['alerts'], passed?: number): Promise<void>;
  kill(): Promise<void>;
  signal(name: NodeJS.Signals): void;
  leap(ms: number): Promise<void>;
}

/** Makes a broker that is not running yet. Its start() starts it. */
export async function prepareBroker(
  options: { dataDir?: string; flags?: string[] } = {},
): Promise<KillableBroker> {
  const dataDir = options.dataDir ?? temporaryFolder('broker');
  const [http, grpc] = [await freeAddress(), await freeAddress()];
  const more = options.flags ?? [];
  const database = more.includes('--database-url') ? [] : await databaseFlags(dataDir);
  const flags = ['--data-dir', dataDir, '--http', http, '--grpc', grpc, ...database, ...more];
  const { options: transport, close } = through({ socketPath: join(dataDir, 'broker.sock') });
  const client = new Farhand({ baseUrl: 'http://broker.sock', retries: 0, ...transport });
  let child: ChildProcess | undefined;
  let ahead = 0;
  const kill = async (): Promise<void> => {
    if (!child || child.exitCode !== null || child.signalCode !== null) return;
    const ended = once(child, 'exit');
    child.kill('SIGKILL');
    await ended;
  };
  onTestFinished(async () => {
    await kill();
    await close();
  });
  return {
    ...{ dataDir, grpc, client, kill },
    signal: (name) => void child?.kill(name),
    joinToken: async () => (await client.joinTokens.create({ uses: 1 })).token,
    async start(alerts = {}, passed = 0) {
      ahead += passed;
      const params: BrokerProcessOptions = { flags, alerts, ahead };
      child = fork(join(import.meta.dirname, 'killable-broker-process.ts'), [JSON.stringify(params)]);
      const [message] = await Promise.race([once(child, 'message'), once(child, 'exit')]);
      if (message !== 'started') throw new Error(`the broker ended with ${message} before it was up`);
    },
    async leap(ms) {
      ahead += ms;
      if (!child) return;
      const leapt = once(child, 'message');
      child.send(ms);
      await leapt;
    },
  };
}

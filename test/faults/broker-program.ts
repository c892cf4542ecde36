// Starts the shipped broker as a separate process that a test kills and starts again, and agents that link to it.
import { once } from 'node:events';
import { withBroker } from '../../broker/cli/connect-to-broker.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { freeAddress } from '../find-free-ports.ts';
import { temporaryFolder } from '../start-farhand.ts';
import { program } from '../start-processes.ts';

export async function startBrokerProgram({ flags = [] as string[], under = [] as string[] } = {}) {
  const dataDir = temporaryFolder('broker');
  const [http, grpc] = [await freeAddress(), await freeAddress()];
  let child: ReturnType<typeof program>;
  const start = async (directory = dataDir): Promise<void> => {
    const args = ['--data-dir', directory, '--http', http, '--grpc', grpc, ...flags];
    child = program('broker/main.ts', args, under);
    await child.line('broker is up');
  };
  await start();
  const { key } = await withBroker({ dataDir, url: undefined, apiKey: undefined }, (local) =>
    local.keys.create({ name: 'test', scopes: ['admin'] }),
  );
  /** A client with an admin key, without retries. It can be used again after each start. */
  const client = new Farhand({ baseUrl: `http://${http}`, apiKey: key, retries: 0 });
  return {
    ...{ dataDir, http, grpc, key, client },
    /** Starts the broker again at its addresses, on its data directory or on another one. */
    start,
    /** Sends a signal to the broker. Resolves with its exit code. */
    async kill(signal: NodeJS.Signals = 'SIGKILL'): Promise<number | null> {
      const ended = once(child, 'exit');
      child.kill(signal);
      return (await ended)[0];
    },
    /** Returns the process of the current broker. */
    child: () => child,
    /** Starts an agent as a separate process. Resolves when it is linked. */
    async agent(directory = temporaryFolder('agent'), more: string[] = []) {
      const { token } = await client.joinTokens.create({ uses: 1 });
      const args = ['--broker', grpc, '--data-dir', directory, '--join-token', token, ...more];
      const agent = program('agent/main.ts', args);
      await agent.line('linked');
      return agent;
    },
    /** Returns the id of the first machine. */
    machineId: async (): Promise<string> => (await client.machines.list()).items[0]?.id ?? '',
  };
}

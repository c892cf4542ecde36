// Counts the functions and files of broker and agent that a request runs. Functions that also run while both are idle
// do not count.
//
//   node scripts/count-functions-per-request.ts [--list] [DIRECTORY OF A CHECKOUT]
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { Session } from 'node:inspector/promises';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { pathToFileURL } from 'node:url';

const words = process.argv.slice(2);
const root = resolve(words.find((word) => !word.startsWith('--')) ?? join(import.meta.dirname, '..'));
const base = pathToFileURL(`${root}/`).href;
const ours = new RegExp(`^${base}(agent|broker|shared)/`);

type Entered = Map<string, string>;

/** Returns the names of the functions that ran since the last call, by file and position. */
async function entered(session: Session): Promise<Entered> {
  const { result } = await session.post('Profiler.takePreciseCoverage');
  const own = result.filter(({ url }) => ours.test(url));
  return new Map(
    own.flatMap(({ url, functions }) =>
      // V8 also reports each file as a function at offset 0. These are left out.
      functions
        .filter(({ ranges: [range] }) => range && range.count > 0 && range.startOffset > 0)
        .map(({ functionName, ranges: [range] }): [string, string] => [
          `${url.slice(base.length)}:${range?.startOffset}`,
          functionName || '(anonymous)',
        ]),
    ),
  );
}

interface Place {
  url: string;
  key: string;
  machine: string;
  folder: string;
}

const requests: Record<string, (place: Place) => [method: string, path: string, body?: object]> = {
  'GET files': ({ machine, folder }) => ['GET', `/machines/${machine}/files?path=${folder}/listed`],
  'PUT content': ({ machine, folder }) => [
    'PUT',
    `/machines/${machine}/files/content`,
    { path: `${folder}/written`, content: 'hello\n' },
  ],
  'POST /commands': ({ machine }) => ['POST', '/commands', { machine_id: machine, command: 'true' }],
};

async function send(place: Place, name: string): Promise<void> {
  const [method, path, body] = requests[name]?.(place) ?? ['GET', '/'];
  const answer = await fetch(`${place.url}/api/v1${path}`, {
    method,
    headers: { Authorization: `Bearer ${place.key}`, 'Content-Type': 'application/json' },
    ...(body && { body: JSON.stringify(body) }),
  });
  const text = await answer.text();
  if (!answer.ok) throw new Error(`${name} answered ${answer.status}: ${text}`);
}

async function measure(session: Session, place: Place): Promise<void> {
  for (const name of Object.keys(requests)) {
    for (let warm = 0; warm < 5; warm += 1) await send(place, name);
    await sleep(1_500);
    await entered(session);
    await sleep(1_000);
    const idle = await entered(session);
    await send(place, name);
    // Part of the work on a request happens after its answer, and counts too.
    await sleep(200);
    const found = [...(await entered(session))].filter(([key]) => !idle.has(key));
    const files = Map.groupBy(found, ([key]) => key.slice(0, key.lastIndexOf(':')));
    console.log(`${name.padEnd(16)} ${found.length} functions in ${files.size} files`);
    if (!words.includes('--list')) continue;
    for (const [file, inside] of [...files].sort(([one], [other]) => (one < other ? -1 : 1)))
      console.log(`  ${file}: ${inside.map(([, one]) => one).join(', ')}`);
  }
}

/** Loads a module of the checkout. The cast is safe if this module has the same exports there as here. */
const load = async <Module>(file: string): Promise<Module> =>
  (await import(pathToFileURL(join(root, file)).href)) as Module;

async function main(): Promise<void> {
  const session = new Session();
  session.connect();
  await session.post('Profiler.enable');
  await session.post('Profiler.startPreciseCoverage', { callCount: true, detailed: false });
  const folder = mkdtempSync(join(tmpdir(), 'farhand-entered-'));
  const { brokerSettings } =
    await load<typeof import('../broker/settings-schema.ts')>('broker/settings-schema.ts');
  const { startBroker } = await load<typeof import('../broker/start/index.ts')>('broker/start/index.ts');
  const { agentSettings } =
    await load<typeof import('../agent/settings-schema.ts')>('agent/settings-schema.ts');
  const { startAgent } = await load<typeof import('../agent/start.ts')>('agent/start.ts');
  const { withBroker } = await load<typeof import('../broker/cli/connect-to-broker.ts')>(
    'broker/cli/connect-to-broker.ts',
  );
  const { readSettings } = await load<typeof import('../shared/read-settings.ts')>('shared/read-settings.ts');
  const { createLogger } = await load<typeof import('../shared/logger.ts')>('shared/logger.ts');
  const log = createLogger('entered', 'silent');
  const [brokerDir, agentDir] = [join(folder, 'broker'), join(folder, 'agent')];
  const local = ['--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0', '--data-dir', brokerDir];
  const broker = await startBroker(readSettings(brokerSettings, { argv: local, env: {} }), log);
  const { token, key } = await withBroker(
    { dataDir: brokerDir, url: undefined, apiKey: undefined },
    async (client) => ({
      token: (await client.joinTokens.create({})).token,
      key: (await client.keys.create({ name: 'entered', scopes: ['admin'] })).key,
    }),
  );
  const linked = Promise.withResolvers<void>();
  const argv = ['--broker', broker.grpc ?? '', '--join-token', token, '--data-dir', agentDir];
  const agent = await startAgent(readSettings(agentSettings, { argv, env: {} }), log, (up) => {
    if (up) linked.resolve();
  });
  await linked.promise;
  try {
    mkdirSync(join(folder, 'listed'));
    for (const name of ['a', 'b', 'c']) writeFileSync(join(folder, 'listed', name), name);
    await measure(session, { url: broker.url ?? '', key, machine: agent.machineId, folder });
  } finally {
    await agent.close();
    await broker.close();
    rmSync(folder, { recursive: true, force: true });
  }
}

await main();

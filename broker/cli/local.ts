// The broker of a data directory on this very box, over its socket file; one is started if none runs.
import { type ChildProcess, spawn } from 'node:child_process';
import { existsSync, readdirSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { Agent } from 'undici';
import * as z from 'zod';
import { StartError } from '../../shared/errors.ts';
import { brokerProgram } from '../../shared/home.ts';
import { failureOf } from '../../shared/sdk/failure.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { hint } from './output.ts';
import { demandAccess } from './owner.ts';
import { through } from './tls.ts';

interface SocketOptions {
  /** A directory that is empty or missing becomes a broker's. */
  mayBegin?: boolean | undefined;
  /** Only one that runs is asked: none is started for it. */
  mustRun?: boolean;
  patienceMs?: number;
}

/** Asks for what is no part of the API: only the broker's own box may. */
type Post = (path: string) => Promise<{ directory: string }>;

export async function withSocket<T>(
  dataDir: string,
  use: (client: Farhand, post: Post) => Promise<T>,
  { mayBegin = false, mustRun = false, patienceMs = 3_000 }: SocketOptions = {},
): Promise<T> {
  demandAccess(dataDir);
  const way = through(new Agent({ connect: { socketPath: join(dataDir, 'broker.sock') } }));
  const client = new Farhand({ baseUrl: 'http://broker.sock', ...way.options });
  const probe = new Farhand({ baseUrl: 'http://broker.sock', retries: 0, ...way.options });
  let own: ChildProcess | undefined;
  try {
    if (!(await runs(probe, dataDir, patienceMs))) {
      if (mustRun) throw new StartError(`no broker runs on ${dataDir}`, 1);
      own = await startLocal(dataDir, mayBegin);
    }
    return await use(client, (path) => postTo(way.options.fetch, path));
  } finally {
    await way.close();
    if (own) await end(own);
  }
}

/** Starts a broker with more flags, and stops it once it is up. Throws StartError where it cannot start. */
export async function startOnce(dataDir: string, ...flags: string[]): Promise<void> {
  demandAccess(dataDir);
  await end(await startLocal(dataDir, false, flags));
}

const local = z.object({ data: z.object({ directory: z.string() }) });

async function postTo(ask: typeof fetch, path: string): Promise<{ directory: string }> {
  const response = await ask(`http://broker.sock${path}`, { method: 'POST' });
  const text = await response.text();
  if (!response.ok) throw failureOf(response, text);
  return local.parse(JSON.parse(text)).data;
}

/** Nobody listens, or somebody answers; who listens and is silent is stuck, and holds the directory. */
async function runs(client: Farhand, dataDir: string, patienceMs: number): Promise<boolean> {
  const signal = AbortSignal.timeout(patienceMs);
  return client.service.healthz({}, { signal }).then(
    () => true,
    () => {
      if (!signal.aborted) return false;
      throw new StartError(
        `the broker of ${dataDir} runs, but does not answer: systemctl status farhand-broker and its log tell more`,
        1,
      );
    },
  );
}

/** Only a broker ever opens its state: start one that serves nothing but the socket file. */
function startLocal(dataDir: string, mayBegin: boolean, flags: string[] = []): Promise<ChildProcess> {
  demandData(dataDir, mayBegin);
  const args = [brokerProgram, '--local', '--data-dir', dataDir, '--log-level', 'warn', ...flags];
  const child = spawn(process.execPath, args, { stdio: ['ignore', 'pipe', 'inherit'], ...ownerOf(dataDir) });
  return new Promise((resolve, reject) => {
    child.once('error', reject);
    child.once('exit', () =>
      reject(new StartError(`the broker in ${dataDir} cannot be reached or started`, 1)),
    );
    // It prints the socket's path once it listens.
    child.stdout.once('data', () => resolve(child));
  });
}

/** A directory that was mistyped must not become a broker of its own; the first key may come before its first start. */
function demandData(dataDir: string, mayBegin: boolean): void {
  if (existsSync(join(dataDir, 'state.json'))) return;
  const isNew = !existsSync(dataDir) || readdirSync(dataDir).length === 0;
  if (!mayBegin || !isNew) throw new StartError(`there is no broker’s data in ${dataDir}`);
  hint(`farhand: ${dataDir} is new: the data of a new broker begins there`);
}

/** As root, what is made in the directory must belong to its owner. */
function ownerOf(dataDir: string): { uid?: number; gid?: number } {
  if (process.getuid?.() !== 0 || !existsSync(dataDir)) return {};
  const { uid, gid } = statSync(dataDir);
  return { uid, gid };
}

function end(child: ChildProcess): Promise<void> {
  return new Promise((resolve) => {
    child.removeAllListeners('exit');
    child.once('exit', () => resolve());
    child.kill('SIGTERM');
  });
}

// The broker of a data directory on this very box, over its socket file; one is started if none runs.
import { type ChildProcess, spawn } from 'node:child_process';
import { existsSync, readdirSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { Agent } from 'undici';
import * as z from 'zod';
import { monotonic, sleep } from '../../shared/clock.ts';
import { demandAccess } from '../../shared/doctor/owner.ts';
import { StartError } from '../../shared/errors.ts';
import { brokerProgram } from '../../shared/home.ts';
import { inUse } from '../../shared/program.ts';
import { failureOf } from '../../shared/sdk/failure.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { hint } from './output.ts';
import { through } from './tls.ts';
import { put } from './told.ts';

interface SocketOptions {
  /** A directory that is empty or missing becomes a broker's. */
  mayBegin?: boolean | undefined;
  /** Only one that runs is asked: none is started for it. */
  mustRun?: boolean;
  /** For an answer of one that listens, and for one that holds the directory and does not listen yet. */
  patienceMs?: number;
  startMs?: number;
}

/** Asks for what is no part of the API: only the broker's own box may. */
type Post = (path: string) => Promise<{ directory: string }>;

export async function withSocket<T>(
  dataDir: string,
  use: (client: Farhand, post: Post) => Promise<T>,
  options: SocketOptions = {},
): Promise<T> {
  demandAccess(dataDir);
  const way = through(new Agent({ connect: { socketPath: join(dataDir, 'broker.sock') } }));
  const client = new Farhand({ baseUrl: 'http://broker.sock', ...way.options });
  const probe = new Farhand({ baseUrl: 'http://broker.sock', retries: 0, ...way.options });
  let own: ChildProcess | undefined;
  try {
    own = await startUnlessRunning(probe, dataDir, options);
    return await use(client, (path) => postTo(way.options.fetch, path));
  } finally {
    await way.close();
    if (own) await end(own);
  }
}

const pauseMs = 300;
const lookAtLog = 'systemctl status farhand-broker and its log tell more';

/** A broker of our own, where none runs; one that is starting or stopping holds the directory and is waited for. */
async function startUnlessRunning(
  probe: Farhand,
  dataDir: string,
  { mayBegin = false, mustRun = false, patienceMs = 3_000, startMs = 30_000 }: SocketOptions,
): Promise<ChildProcess | undefined> {
  const late = monotonic() + startMs;
  for (let first = true; !(await runs(probe, dataDir, patienceMs)); first = false) {
    if (mustRun) throw new StartError(`no broker runs on ${dataDir}`, 1);
    const own = await startLocal(dataDir, mayBegin);
    if (own) return own;
    if (monotonic() > late) {
      throw new StartError(
        `a broker holds ${dataDir} and has not listened for ${startMs / 1000} s: ${lookAtLog}`,
        1,
      );
    }
    if (first) hint(`farhand: waiting for the broker of ${dataDir}, which is starting or stopping`);
    await sleep(pauseMs);
  }
  return undefined;
}

/** Starts a broker with more flags, and stops it once it is up. Throws StartError where it cannot start. */
export async function startOnce(dataDir: string, ...flags: string[]): Promise<void> {
  demandAccess(dataDir);
  const own = await startLocal(dataDir, false, flags);
  if (!own) throw new StartError(`another broker already uses ${dataDir}: stop it first`, 1);
  await end(own);
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
      throw new StartError(`the broker of ${dataDir} runs, but does not answer: ${lookAtLog}`, 1);
    },
  );
}

/** Only a broker ever opens its state: starts one that serves nothing but the socket file; undefined where another holds it. */
function startLocal(
  dataDir: string,
  mayBegin: boolean,
  flags: string[] = [],
): Promise<ChildProcess | undefined> {
  demandData(dataDir, mayBegin);
  const args = [brokerProgram, '--local', '--data-dir', dataDir, '--log-level', 'warn', ...flags];
  const child = spawn(process.execPath, args, { stdio: ['ignore', 'pipe', 'pipe'], ...ownerOf(dataDir) });
  let said = '';
  const hear = (text: string): void => {
    said += text;
  };
  child.stderr.setEncoding('utf8').on('data', hear);
  return new Promise((resolve, reject) => {
    child.once('error', reject);
    // After its last words.
    child.once('close', () => {
      if (said.includes(inUse('broker', dataDir))) return resolve(undefined);
      put('stderr', said);
      reject(new StartError(`the broker in ${dataDir} cannot be reached or started`, 1));
    });
    // It prints the socket's path once it listens.
    child.stdout.once('data', () => {
      put('stderr', said);
      said = '';
      child.stderr.off('data', hear).pipe(process.stderr, { end: false });
      resolve(child);
    });
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
    child.once('exit', () => resolve());
    child.kill('SIGTERM');
  });
}

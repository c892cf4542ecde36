// Calls the broker of a data directory on this machine over its socket file. Starts a broker if none runs.
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, readdirSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { monotonic, sleep } from '../../shared/clock.ts';
import { assertAccess } from '../../shared/doctor/directory-checks.ts';
import { StartError } from '../../shared/errors.ts';
import { brokerProgram } from '../../shared/paths-in-checkout-or-package.ts';
import { inUse } from '../../shared/program-start-and-end.ts';
import { failureOf, noAnswer } from '../../shared/sdk/errors-and-envelopes.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { through } from './pinned-transport.ts';
import { hint } from './print.ts';
import { writeNow } from './stdout-stderr-and-exit.ts';

interface SocketOptions {
  /** True if an empty or missing directory may become a broker's data directory. */
  mayCreate?: boolean | undefined;
  /** If true, throws when no broker runs. Otherwise starts a broker. */
  mustRun?: boolean;
  /**
   * `answerMs`: milliseconds in which a listening broker must answer. `startMs`: milliseconds in which a starting
   * broker must listen.
   */
  answerMs?: number;
  startMs?: number;
}

/** Calls a route that exists only on the socket file and is not part of the API. T is the type of the answer. */
type Post = <T>(path: string) => Promise<T>;

export async function withSocket<T>(
  dataDir: string,
  use: (client: Farhand, post: Post) => Promise<T>,
  options: SocketOptions = {},
): Promise<T> {
  assertAccess(dataDir);
  const transport = through({ socketPath: join(dataDir, 'broker.sock') });
  const to = { baseUrl: 'http://broker.sock', ...transport.options };
  let own: ChildProcess | undefined;
  try {
    own = await startUnlessRunning(new Farhand({ ...to, retries: 0 }), dataDir, options);
    return await use(new Farhand(to), async <T>(path: string) => {
      const failed = (error: unknown): never => {
        throw noAnswer(to.baseUrl, error);
      };
      const response = await transport.options
        .fetch(`${to.baseUrl}${path}`, { method: 'POST' })
        .catch(failed);
      const text = await response.text();
      if (!response.ok) throw failureOf(response, text);
      // The cast is safe: the broker is from the same installation as this program, and answers with this shape.
      return (JSON.parse(text) as { data: T }).data;
    });
  } finally {
    await transport.close();
    if (own) await stop(own);
  }
}

/**
 * Starts a broker with flags that change its data, such as --accept-state, and stops it once it listens. Throws
 * StartError on failure.
 */
export async function startOnce(dataDir: string, ...flags: string[]): Promise<void> {
  assertAccess(dataDir);
  const own = await startLocal(dataDir, false, flags);
  if (!own) throw new StartError(`another broker already uses ${dataDir}; stop that broker first`, 1);
  await stop(own);
}

const seeLog = 'see systemctl status farhand-broker, and the log of the broker';

/**
 * Starts a broker and returns it; returns undefined if one already runs. Waits for a broker that is starting or
 * stopping.
 */
async function startUnlessRunning(
  probe: Farhand,
  dataDir: string,
  { mayCreate = false, mustRun = false, answerMs = 3_000, startMs = 30_000 }: SocketOptions,
): Promise<ChildProcess | undefined> {
  const late = monotonic() + startMs;
  for (let first = true; !(await listens(probe, dataDir, answerMs)); first = false) {
    if (mustRun) throw new StartError(`no broker runs on ${dataDir}; start the broker first`, 1);
    const own = await startLocal(dataDir, mayCreate);
    if (own) return own;
    if (monotonic() > late) {
      const why = `a broker uses ${dataDir}, but still does not listen after ${startMs / 1000} s`;
      throw new StartError(`${why}; ${seeLog}`, 1);
    }
    if (first) hint(`farhand: waiting for the broker on ${dataDir}, which is starting or stopping`);
    await sleep(300);
  }
  return undefined;
}

/** True if a broker listens. Throws StartError if a broker accepts connections but does not answer. */
async function listens(client: Farhand, dataDir: string, answerMs: number): Promise<boolean> {
  const signal = AbortSignal.timeout(answerMs);
  return client.service.healthz({}, { signal }).then(
    () => true,
    () => {
      if (!signal.aborted) return false;
      throw new StartError(`the broker on ${dataDir} runs, but does not answer; ${seeLog}`, 1);
    },
  );
}

/**
 * Starts a broker that serves only the socket file. It is needed because the CLI reads and changes the state only
 * through a broker. Returns undefined if a broker already runs on this data directory.
 */
async function startLocal(dataDir: string, mayCreate: boolean, flags: string[] = []) {
  assertData(dataDir, mayCreate);
  const args = [brokerProgram, '--local', '--data-dir', dataDir, '--log-level', 'warn', ...flags];
  // Standard input stays open without data. Its end makes the broker end, even if this program is killed.
  const child = spawn(process.execPath, args, { stdio: 'pipe', ...ownerOf(dataDir) });
  let log = '';
  child.stderr.setEncoding('utf8').on('data', (text: string) => {
    log += text;
  });
  // The broker prints the socket's path once it listens.
  const ready = await Promise.race([
    once(child.stdout, 'data').then(() => true),
    once(child, 'close').then(() => false),
  ]);
  if (!ready && log.includes(inUse('broker', dataDir))) return undefined;
  writeNow('stderr', log);
  if (!ready)
    throw new StartError(`no broker could be started on ${dataDir}; see the lines above for the reason`, 1);
  child.stderr.removeAllListeners('data').pipe(process.stderr, { end: false });
  return child;
}

/**
 * Throws if the directory contains no broker's data, so that a mistyped path does not become a data directory. Accepts
 * a new directory if `mayCreate` is set.
 */
function assertData(dataDir: string, mayCreate: boolean): void {
  // A broker with a database keeps its state in the database, not in the data directory.
  const file = process.env.FARHAND_DATABASE_URL === undefined ? 'state.json' : 'authority.json';
  if (existsSync(join(dataDir, file))) return;
  if (existsSync(join(dataDir, 'authority.json')))
    throw new StartError(
      `${dataDir} has no state.json. If its broker uses a database, start that broker, or set FARHAND_DATABASE_URL and run this command again. Otherwise start the broker: it prints how to recover state.json`,
    );
  const isNew = !existsSync(dataDir) || readdirSync(dataDir).length === 0;
  if (!mayCreate || !isNew)
    throw new StartError(`${dataDir} does not contain a broker’s data; check --data-dir`);
  hint(`farhand: creating the data directory of a new broker: ${dataDir}`);
}

/**
 * Returns the user and group for a new broker. If root runs this program, the broker runs as the owner of the data
 * directory. Its new files then belong to that owner too.
 */
function ownerOf(dataDir: string): { uid?: number; gid?: number } {
  if (process.getuid?.() !== 0 || !existsSync(dataDir)) return {};
  const { uid, gid } = statSync(dataDir);
  return { uid, gid };
}

async function stop(child: ChildProcess): Promise<void> {
  if (child.kill('SIGTERM')) await once(child, 'exit');
}

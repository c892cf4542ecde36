// How the CLI reaches its broker: over HTTP with a key, or over the socket file in the broker's own data directory.
import { type ChildProcess, spawn } from 'node:child_process';
import { existsSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { Agent, WebSocket as UndiciWebSocket, fetch as undiciFetch } from 'undici';
import { StartError } from '../../shared/errors.ts';
import { brokerProgram } from '../../shared/home.ts';
import { Farhand } from '../../shared/sdk/index.ts';

export interface Where {
  /** The broker's data directory on this very box. */
  dataDir: string | undefined;
  url: string | undefined;
  apiKey: string | undefined;
}

/** Calls `use` with a client; whatever was opened or started for it is ended afterwards. */
export async function withBroker<T>(where: Where, use: (client: Farhand) => Promise<T>): Promise<T> {
  if (where.dataDir) return withSocket(where.dataDir, use);
  if (!where.url || !where.apiKey) {
    throw new StartError(
      'say which broker: FARHAND_URL and FARHAND_API_KEY, or --data-dir DIR on the broker’s own box',
    );
  }
  const { url } = where;
  return use(new Farhand({ baseUrl: url, apiKey: where.apiKey })).catch((error: unknown) => {
    // fetch says no more than that when nobody answers.
    if (error instanceof TypeError) throw new StartError(`no broker answers at ${url}`, 1, { cause: error });
    throw error;
  });
}

async function withSocket<T>(dataDir: string, use: (client: Farhand) => Promise<T>): Promise<T> {
  const socketPath = join(dataDir, 'broker.sock');
  const dispatcher = new Agent({ connect: { socketPath } });
  const client = new Farhand({
    baseUrl: 'http://broker.sock',
    // undici's fetch is the global one with a dispatcher; only its types are its own.
    fetch: ((url: string, init: object) =>
      undiciFetch(url, { ...init, dispatcher })) as unknown as typeof fetch,
    webSocket: (url) => new UndiciWebSocket(url, { dispatcher }),
  });
  const own = (await answers(client)) ? undefined : await startLocal(dataDir);
  try {
    return await use(client);
  } finally {
    await dispatcher.close();
    if (own) await end(own);
  }
}

async function answers(client: Farhand): Promise<boolean> {
  return client.service.healthz().then(
    () => true,
    () => false,
  );
}

/** Only a broker ever opens its state: start one that serves nothing but the socket file. */
function startLocal(dataDir: string): Promise<ChildProcess> {
  const child = spawn(
    process.execPath,
    [brokerProgram, '--local', '--data-dir', dataDir, '--log-level', 'warn'],
    {
      stdio: ['ignore', 'pipe', 'inherit'],
      ...ownerOf(dataDir),
    },
  );
  return new Promise((resolve, reject) => {
    child.once('error', reject);
    child.once('exit', () =>
      reject(new StartError(`the broker in ${dataDir} cannot be reached or started`, 1)),
    );
    // It prints the socket's path once it listens.
    child.stdout.once('data', () => resolve(child));
  });
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

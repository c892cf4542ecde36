// HTTP load: requests per second over 32 connections, and a prober that sends requests at a fixed rate.
import { once } from 'node:events';
import { connect, type Socket } from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';
import { Pool } from 'undici';
import { at } from '../start-and-measure-programs.ts';

const connections = 32;

/** Measures requests per second for some seconds. Rejects if the status of an answer is not 200. */
export async function perSecond(url: string, key: string, seconds: number): Promise<number> {
  const { hostname, port, pathname, search } = new URL(url);
  const head = `GET ${pathname}${search} HTTP/1.1\r\nHost: ${hostname}\r\nAuthorization: Bearer ${key}\r\n\r\n`;
  const request = Buffer.from(head);
  const lanes = await Promise.all(
    Array.from({ length: connections }, async () => {
      const socket = connect(Number(port), hostname).setNoDelay();
      await once(socket, 'connect');
      return new Lane(socket, request);
    }),
  );
  for (const lane of lanes) lane.start();
  const begun = performance.now();
  await Promise.race([sleep(seconds * 1000), ...lanes.map(({ failed }) => failed)]);
  const took = (performance.now() - begun) / 1000;
  const answers = lanes.reduce((sum, lane) => sum + lane.end(), 0);
  return answers / took;
}

const headEnd = Buffer.from('\r\n\r\n');

/** One keep-alive connection. Sends the next request when the previous answer is complete. */
class Lane {
  readonly failed: Promise<never>;
  readonly #socket: Socket;
  readonly #request: Buffer;
  #rest: Buffer = Buffer.alloc(0);
  /** Bytes of the present body that have not arrived yet. */
  #missing = 0;
  #answers = 0;

  constructor(socket: Socket, request: Buffer) {
    this.#socket = socket;
    this.#request = request;
    const { promise, reject } = Promise.withResolvers<never>();
    this.failed = promise;
    this.failed.catch(() => undefined);
    socket.on('error', reject).once('close', () => reject(new Error('the server closed a connection')));
    socket.on('data', (chunk: Buffer) => {
      try {
        this.#receive(chunk);
      } catch (error) {
        reject(error);
      }
    });
  }

  start(): void {
    this.#socket.write(this.#request);
  }

  end(): number {
    this.#socket.destroy();
    return this.#answers;
  }

  #receive(chunk: Buffer): void {
    if (this.#missing === 0) {
      this.#rest = this.#rest.length === 0 ? chunk : Buffer.concat([this.#rest, chunk]);
      const end = this.#rest.indexOf(headEnd);
      if (end < 0) return;
      const head = this.#rest.toString('latin1', 0, end);
      const length = /\r\ncontent-length: (\d+)/i.exec(head)?.[1];
      if (!head.startsWith('HTTP/1.1 200') || length === undefined) throw new Error(head);
      this.#missing = Number(length) - (this.#rest.length - end - headEnd.length);
      this.#rest = Buffer.alloc(0);
    } else {
      this.#missing -= chunk.length;
    }
    if (this.#missing > 0) return;
    this.#answers += 1;
    this.#socket.write(this.#request);
  }
}

export interface Probed {
  requests: number;
  /** Number of requests that failed or got another status than 200. */
  failed: number;
  p50: number;
  p99: number;
  longest: number;
}

const probeEveryMs = 20;
const probeConnections = 64;
/**
 * Milliseconds without an answer after which a request of the prober fails. All delays that were measured so far are
 * shorter.
 */
const probeTimeoutMs = 60_000;

/**
 * Sends a GET request every 20 ms until stop(), without waiting for earlier answers. The time of a request, in
 * milliseconds, includes the wait for a free connection.
 */
export class Prober {
  readonly #pool: Pool;
  readonly #path: string;
  readonly #headers: Record<string, string>;
  readonly #timer: NodeJS.Timeout;
  readonly #open = new Set<Promise<void>>();
  readonly #times: number[] = [];
  #failed = 0;

  constructor(origin: string, path: string, key: string) {
    this.#pool = new Pool(origin, { connections: probeConnections, headersTimeout: probeTimeoutMs });
    this.#path = path;
    this.#headers = { authorization: `Bearer ${key}` };
    this.#timer = setInterval(() => this.#send(), probeEveryMs);
    // The first request is sent at once, because the measured work may end before the timer fires.
    this.#send();
  }

  async stop(): Promise<Probed> {
    clearInterval(this.#timer);
    await Promise.all(this.#open);
    await this.#pool.close();
    const sorted = this.#times.toSorted((a, b) => a - b);
    return {
      requests: sorted.length,
      failed: this.#failed,
      p50: at(sorted, 0.5),
      p99: at(sorted, 0.99),
      longest: sorted.at(-1) ?? Number.NaN,
    };
  }

  #send(): void {
    const sent = performance.now();
    const answered = this.#pool
      .request({ path: this.#path, method: 'GET', headers: this.#headers })
      .then(async ({ statusCode, body }) => {
        await body.dump();
        if (statusCode !== 200) throw new Error(`answered ${statusCode}`);
        this.#times.push(performance.now() - sent);
      })
      .catch(() => {
        this.#failed += 1;
      })
      .finally(() => this.#open.delete(answered));
    this.#open.add(answered);
  }
}

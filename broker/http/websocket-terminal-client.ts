// Serves a terminal client over a WebSocket: reads its messages, pings it, and limits the data that waits in each
// direction.
import type { WebSocket } from 'ws';
import { closeCodes } from '../../shared/api/close-codes.ts';
import { receivedMessage } from '../../shared/api/terminal-websocket.ts';
import { every, monotonic } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { Wake } from '../../shared/wait-for-change.ts';
import {
  type Action,
  actionOf,
  type ClientPort,
  type CloseReason,
  type Notice,
} from '../sessions/terminal-client.ts';
import { assertJsonLimits } from './body.ts';

const pingMs = 15_000;
/**
 * Number of unanswered pings after which a client is disconnected. The first of these pings is then 30 seconds old.
 */
const maxUnanswered = 2;
/** Bytes of input that may wait for the terminal. If more are waiting, the socket is not read. */
const maxWaiting = 64 * 1024;
/** Maximum number of bytes of a message by which the client reports how much output it has received. */
const reportBytes = 64;
/** Bytes counted for each waiting message in addition to its data. */
const messageCost = 64;
/**
 * Milliseconds after which a client is disconnected if the machine accepts none of its input. The socket is paused in
 * this time, so without this limit the broker could not notice that the client has disconnected.
 */
const stuckMs = 25_000;

const closeReasons: Readonly<Record<CloseReason['why'], string>> = {
  ended: 'the session ended',
  stopping: 'the broker is stopping, or another broker takes over the machine; attach again',
  detached: 'this client was detached; the session goes on',
  forbidden: 'this key is no longer allowed to attach to the session',
  fell_behind: 'this client read too slowly; attach again',
};

/** A terminal client of a session; the client is connected through a WebSocket. */
export class WebSocketClient implements ClientPort {
  readonly actions: AsyncIterable<Action>;
  readonly #ws: WebSocket;
  readonly #gone = new AbortController();
  /** Messages that the session has not read yet. While they exceed maxWaiting, the socket is not read. */
  #waiting: { data: Buffer; binary: boolean }[] = [];
  #waitingBytes = 0;
  readonly #changed = new Wake();
  /** Offset after the last byte of output that was sent. */
  #sent = 0;
  /** Offset up to which the client has reported output as processed; undefined until it sends such a report. */
  #received: number | undefined;
  readonly #reported = new Wake();
  #closing = false;
  #takenAt = monotonic();
  /** Number of pings sent since the client last sent a message, ping or pong. */
  #unanswered = 0;
  #ponging = false;

  constructor(ws: WebSocket) {
    this.#ws = ws;
    const stopPings = every(pingMs, () => this.#ping());
    this.actions = this.#read();
    // Messages are Buffers, because binaryType has its default value.
    ws.on('message', (data, binary) => this.#receive(data as Buffer, binary));
    ws.on('ping', (data) => this.#pong(data));
    for (const event of ['message', 'ping', 'pong'] as const) {
      ws.on(event, () => {
        this.#unanswered = 0;
      });
    }
    // Errors need no handling, because the library reports them to the client in a close frame.
    ws.on('error', () => {});
    ws.once('close', () => {
      stopPings();
      this.#changed.wake();
      this.#reported.wake();
      if (!this.#closing) this.#gone.abort();
    });
  }

  get gone(): AbortSignal {
    return this.#gone.signal;
  }

  /**
   * Sends output. Resolves once the client has reported that it processed this output. If the client has never sent
   * such a report, resolves once the output is sent.
   */
  async output(bytes: Uint8Array): Promise<void> {
    this.#sent += bytes.length;
    const end = this.#sent;
    await this.#send(bytes);
    while (this.#awaitsReports && (this.#received ?? end) < end) await this.#reported.wait();
  }

  notify(notice: Notice): Promise<void> {
    if (notice.type === 'ready') this.#sent = notice.offset;
    return this.#send(JSON.stringify(notice));
  }

  close(closeReason: CloseReason): void {
    if (this.#closing) return;
    this.#closing = true;
    const { why, ...ending } = closeReason;
    if (why === 'ended') void this.#send(JSON.stringify({ type: 'end', ...ending }));
    this.#close(closeCodes[why], closeReasons[why]);
  }

  /**
   * True while the client can still report how many bytes it has received. It cannot if the socket is closed, or is
   * paused because earlier input waits.
   */
  get #awaitsReports(): boolean {
    return this.#ws.readyState === this.#ws.OPEN && !this.#ws.isPaused;
  }

  #send(message: Uint8Array | string): Promise<void> {
    const binary = typeof message !== 'string';
    return new Promise((resolve) => this.#ws.send(message, { binary }, () => resolve()));
  }

  /** Drops waiting messages and sends a close frame. Continues to read until the client's close frame arrives. */
  #close(code: number, reason: string): void {
    this.#waiting = [];
    this.#ws.resume();
    this.#ws.close(code, reason);
    this.#changed.wake();
  }

  #receive(data: Buffer, binary: boolean): void {
    if (this.#ws.readyState !== this.#ws.OPEN) return;
    // A report about received output is processed at once, before any waiting input. Behind that input, it could wait
    // forever: a program may read no input until the client has received its output.
    const report = binary ? undefined : reportIn(data);
    if (report !== undefined) {
      this.#received = report;
      this.#reported.wake();
      return;
    }
    this.#waiting.push({ data, binary });
    this.#waitingBytes += data.length + messageCost;
    if (this.#waitingBytes >= maxWaiting) {
      this.#ws.pause();
      this.#reported.wake();
    }
    this.#changed.wake();
  }

  /** Yields the client's actions. An invalid message closes the connection, but not the session. */
  async *#read(): AsyncGenerator<Action> {
    try {
      for (;;) {
        const next = this.#waiting.shift();
        if (next) {
          this.#waitingBytes -= next.data.length + messageCost;
          this.#takenAt = monotonic();
          if (this.#waitingBytes < maxWaiting && this.#ws.isPaused) this.#ws.resume();
          yield next.binary ? { input: next.data } : actionOf(parseJson(next.data));
        } else if (this.#ws.readyState === this.#ws.OPEN) await this.#changed.wait(this.#gone.signal);
        else return;
      }
    } catch (error) {
      if (!(error instanceof AppError)) throw error;
      // A close reason has at most 123 bytes (RFC 6455 section 5.5), so it is cut to 120 ASCII characters.
      this.#close(1008, error.message.replaceAll(/[^\x20-\x7e]/g, '?').slice(0, 120));
    }
  }

  /**
   * Answers a ping. A ping that arrives while an earlier answer is still being sent needs no answer (RFC 6455 section
   * 5.5.3).
   */
  #pong(data: Buffer): void {
    if (this.#ponging) return;
    this.#ponging = true;
    this.#ws.pong(data, false, () => {
      this.#ponging = false;
    });
  }

  /** Pings the client. Disconnects it after unanswered pings, which do not count while the socket is paused. */
  #ping(): void {
    if (this.#ws.isPaused) {
      this.#unanswered = 0;
      if (monotonic() - this.#takenAt >= stuckMs)
        this.#close(closeCodes.fell_behind, 'the machine has accepted no input for too long; attach again');
    }
    if (this.#unanswered >= maxUnanswered) this.#ws.terminate();
    // A closing socket accepts no more pings.
    else if (this.#ws.readyState === this.#ws.OPEN) {
      this.#unanswered += 1;
      this.#ws.ping();
    }
  }
}

/** Returns the offset if a message reports how much output the client has received; otherwise undefined. */
function reportIn(data: Buffer): number | undefined {
  return data.length > reportBytes ? undefined : receivedMessage.safeParse(parseJson(data)).data?.offset;
}

function parseJson(bytes: Buffer): unknown {
  try {
    assertJsonLimits(bytes);
    return JSON.parse(bytes.toString());
  } catch {
    return undefined;
  }
}

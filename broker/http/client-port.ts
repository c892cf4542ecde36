// One WebSocket as a client of a terminal: messages checked and turned into doings, output at the pace of its reader.
import type { WebSocket } from 'ws';
import { closeCodes } from '../../shared/api/terminal.ts';
import { every, monotonic } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { Wake } from '../../shared/pace.ts';
import { type ClientPort, type Doing, doingOf, type Note, type Parting } from '../sessions/client.ts';
import { refuseTangled } from './body.ts';

const pingMs = 15_000;
/** The first of them is then 30 seconds old. */
const maxUnanswered = 2;
/** Bytes that wait for the terminal; more are left in the network. */
const maxWaiting = 64 * 1024;
/** What one message costs besides its bytes. */
const messageCost = 64;
/** A client whose input nobody takes for that long is let go: it may have died, and what it says last is not read. */
const stuckMs = 25_000;

const said: Readonly<Record<Parting['why'], string>> = {
  ended: 'the session ended',
  stopping: 'the broker stops; come back later',
  detached: 'detached',
  forbidden: 'the key may no longer',
  fell_behind: 'too slow; attach again',
};

/** A WebSocket as the client of a session. */
export class SocketPort implements ClientPort {
  readonly doings: AsyncIterable<Doing>;
  readonly #ws: WebSocket;
  readonly #gone = new AbortController();
  /** What nobody has taken yet; while that is much, the socket is not read. */
  #waiting: { data: Buffer; binary: boolean }[] = [];
  #held = 0;
  readonly #changed = new Wake();
  #parted = false;
  #takenAt = monotonic();
  /** Pings in a row without a sign of life. */
  #unanswered = 0;
  #ponging = false;

  constructor(ws: WebSocket) {
    this.#ws = ws;
    const stopPings = every(pingMs, () => this.#ping());
    this.doings = this.#read();
    // As long as binaryType is left alone, messages are Buffers.
    ws.on('message', (data, binary) => this.#receive(data as Buffer, binary));
    ws.on('ping', (data) => this.#pong(data));
    for (const event of ['message', 'ping', 'pong'] as const) {
      ws.on(event, () => {
        this.#unanswered = 0;
      });
    }
    // What went wrong it tells the client itself, with a close.
    ws.on('error', () => {});
    ws.once('close', () => {
      stopPings();
      this.#changed.wake();
      if (!this.#parted) this.#gone.abort();
    });
  }

  get gone(): AbortSignal {
    return this.#gone.signal;
  }

  output(bytes: Uint8Array | string): Promise<void> {
    const binary = typeof bytes !== 'string';
    return new Promise((resolve) => this.#ws.send(bytes, { binary }, () => resolve()));
  }

  note(note: Note): Promise<void> {
    return this.output(JSON.stringify(note));
  }

  part(parting: Parting): void {
    if (this.#parted) return;
    this.#parted = true;
    const { why, ...ending } = parting;
    if (why === 'ended') void this.output(JSON.stringify({ type: 'end', ...ending }));
    this.#close(closeCodes[why], said[why]);
  }

  /** Nobody wants what it still does, but its close must be read. */
  #close(code: number, reason: string): void {
    this.#waiting = [];
    this.#ws.resume();
    this.#ws.close(code, reason);
    this.#changed.wake();
  }

  #receive(data: Buffer, binary: boolean): void {
    if (this.#ws.readyState !== this.#ws.OPEN) return;
    this.#waiting.push({ data, binary });
    this.#held += data.length + messageCost;
    if (this.#held >= maxWaiting) this.#ws.pause();
    this.#changed.wake();
  }

  /** A message that no client should send ends the connection, not the session. */
  async *#read(): AsyncGenerator<Doing> {
    try {
      for (;;) {
        const next = this.#waiting.shift();
        if (next) {
          this.#held -= next.data.length + messageCost;
          this.#takenAt = monotonic();
          if (this.#held < maxWaiting && this.#ws.isPaused) this.#ws.resume();
          yield next.binary ? { input: next.data } : doingOf(parseJson(next.data));
        } else if (this.#ws.readyState === this.#ws.OPEN) await this.#changed.wait(this.#gone.signal);
        else return;
      }
    } catch (error) {
      if (!(error instanceof AppError)) throw error;
      // A reason takes 123 bytes (RFC 6455 section 5.5); ours are of one byte a character.
      this.#close(1008, error.message.replaceAll(/[^\x20-\x7e]/g, '?').slice(0, 120));
    }
  }

  /** One answer at a time; a ping that comes meanwhile needs none (RFC 6455 section 5.5.3). */
  #pong(data: Buffer): void {
    if (this.#ponging) return;
    this.#ponging = true;
    this.#ws.pong(data, false, () => {
      this.#ponging = false;
    });
  }

  /** Asks for a sign of life, and ends a socket that gives none; one that is not read cannot give any for a while. */
  #ping(): void {
    if (this.#ws.isPaused) {
      this.#unanswered = 0;
      if (monotonic() - this.#takenAt >= stuckMs)
        this.#close(closeCodes.fell_behind, 'what was typed is not taken; attach again');
    }
    if (this.#unanswered >= maxUnanswered) this.#ws.terminate();
    // One that is closing takes no more.
    else if (this.#ws.readyState === this.#ws.OPEN) {
      this.#unanswered += 1;
      this.#ws.ping();
    }
  }
}

function parseJson(bytes: Buffer): unknown {
  try {
    refuseTangled(bytes);
    return JSON.parse(bytes.toString());
  } catch {
    return undefined;
  }
}

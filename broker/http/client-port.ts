// One WebSocket as a client of a terminal: messages checked and turned into doings, output at the pace of its reader.
import type { WebSocket } from 'ws';
import { clientMessage, closeCodes } from '../../shared/api/terminal.ts';
import { every, monotonic } from '../../shared/clock.ts';
import { Wake } from '../../shared/pace.ts';
import type { ClientPort, Doing, Note, Parting } from '../sessions/client.ts';
import { refuseTangled } from './body.ts';

const pingMs = 15_000;
/** The first of them is then 30 seconds old. */
const maxUnanswered = 2;
/** Input that waits for the terminal; more is left in the network. */
const maxHeldInput = 64 * 1024;
/** A client whose input nobody takes for that long is let go: it may have died, and what it says last is not read. */
const stuckMs = 25_000;
/** What one message costs besides its bytes. */
const messageCost = 64;

const said: Readonly<Record<Parting['why'], string>> = {
  ended: 'the session ended',
  stopping: 'the broker stops; come back later',
  detached: 'detached',
  forbidden: 'the key may no longer',
  fell_behind: 'too slow; attach again',
};

/** A WebSocket as the client of a session. */
export class SocketPort implements ClientPort {
  readonly #ws: WebSocket;
  readonly #gone = new AbortController();
  /** What the client has done and nobody has taken yet; while that is much, its socket is not read. */
  #waiting: { doing: Doing; cost: number }[] = [];
  #held = 0;
  /** No more will come. */
  #over = false;
  #parted = false;
  readonly #changed = new Wake();
  #takenAt = monotonic();
  /** Pings in a row without a sign of life. */
  #unanswered = 0;
  #ponging = false;

  constructor(ws: WebSocket) {
    this.#ws = ws;
    const stopPings = every(pingMs, () => this.#ping());
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
      this.#end();
      if (!this.#parted) this.#gone.abort();
    });
  }

  get gone(): AbortSignal {
    return this.#gone.signal;
  }

  get doings(): AsyncIterable<Doing> {
    return this.#doings();
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
    this.#end();
    this.#ws.close(code, reason);
  }

  #end(): void {
    this.#over = true;
    this.#changed.wake();
  }

  async *#doings(): AsyncGenerator<Doing> {
    for (;;) {
      const next = this.#waiting.shift();
      if (next) {
        this.#held -= next.cost;
        this.#takenAt = monotonic();
      }
      if (this.#held < maxHeldInput && this.#ws.isPaused) this.#ws.resume();
      if (next) yield next.doing;
      else if (this.#over) return;
      else await this.#changed.wait(this.#gone.signal);
    }
  }

  /** Checks a message at the door; one that no client should send ends the connection, not the session. */
  #receive(bytes: Buffer, binary: boolean): void {
    const message = binary ? undefined : clientMessage.safeParse(parseJson(bytes));
    if (message && !message.success) {
      const { path, message: problem } = message.error.issues[0] ?? { path: [], message: 'not valid' };
      const where = path.map((step) => `${String(step)}: `).join('');
      // A reason takes 123 bytes (RFC 6455 section 5.5); ours are of one byte a character.
      this.#close(1008, `message: ${where}${problem}`.replaceAll(/[^\x20-\x7e]/g, '?').slice(0, 120));
    } else if (!this.#over) {
      const cost = bytes.length + messageCost;
      this.#waiting.push({ doing: message ? doingOf(message.data) : { input: bytes }, cost });
      this.#held += cost;
      if (this.#held >= maxHeldInput) this.#ws.pause();
      this.#changed.wake();
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
    else if (!this.#over) {
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

function doingOf(message: ReturnType<typeof clientMessage.parse>): Doing {
  if (message.type === 'input') return { input: Buffer.from(message.data) };
  if (message.type === 'signal') return { signal: message.signal };
  return { size: { cols: message.cols, rows: message.rows } };
}

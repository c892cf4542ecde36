// One WebSocket as a client of a terminal: messages checked and turned into doings, output at the pace of its reader.
import type { RawData, WebSocket } from 'ws';
import { clientMessage, closeCodes } from '../../shared/api/terminal.ts';
import { every, monotonic } from '../../shared/clock.ts';
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

/** A client as the room of sessions sees it. */
export function portOf(ws: WebSocket): ClientPort {
  const gone = new AbortController();
  const inbox = openInbox(ws);
  let parted = false;
  const stopWatching = watchLife(ws, inbox);
  ws.on('message', (data, binary) => take(ws, inbox, data, binary));
  answerPings(ws);
  // What went wrong it tells the client itself, with a close.
  ws.on('error', () => {});
  ws.once('close', () => {
    stopWatching();
    inbox.end();
    if (!parted) gone.abort();
  });
  const send = (data: Uint8Array | string): Promise<void> =>
    new Promise((resolve) => ws.send(data, { binary: typeof data !== 'string' }, () => resolve()));
  return {
    output: send,
    note: (note: Note) => send(JSON.stringify(note)),
    doings: inbox.doings(),
    gone: gone.signal,
    part(parting: Parting) {
      if (parted) return;
      parted = true;
      inbox.drop();
      if (parting.why === 'ended') ws.send(JSON.stringify(endOf(parting)));
      ws.close(closeCodes[parting.why], said[parting.why]);
    },
  };
}

function endOf({ why: _, ...ending }: Parting & { why: 'ended' }) {
  return { type: 'end', ...ending };
}

/** Checks a message at the door; one that no client should send ends the connection, not the session. */
function take(ws: WebSocket, inbox: Inbox, data: RawData, binary: boolean): void {
  // As long as binaryType is left alone, messages are Buffers.
  const bytes = data as Buffer;
  const message = binary ? undefined : clientMessage.safeParse(parseJson(bytes));
  if (!message || message.success) {
    inbox.put(message ? doingOf(message.data) : { input: bytes }, bytes.length);
    return;
  }
  const { path, message: problem } = message.error.issues[0] ?? { path: [], message: 'not valid' };
  const where = path.map((step) => `${String(step)}: `).join('');
  inbox.drop();
  // A reason takes 123 bytes (RFC 6455 section 5.5); ours are of one byte a character.
  ws.close(1008, `message: ${where}${problem}`.replaceAll(/[^\x20-\x7e]/g, '?').slice(0, 120));
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

interface Inbox {
  put(doing: Doing, bytes: number): void;
  /** No more will come; what is there still counts. */
  end(): void;
  /** Nobody wants more. */
  drop(): void;
  doings(): AsyncIterable<Doing>;
  /** How long nobody has taken anything, in milliseconds. */
  waitedMs(): number;
}

/** What a client has done and nobody has taken yet; while that is much, its socket is not read. */
function openInbox(ws: WebSocket): Inbox {
  let waiting: { doing: Doing; cost: number }[] = [];
  let held = 0;
  let over = false;
  let takenAt = monotonic();
  let wake = (): void => {};
  const end = (): void => {
    over = true;
    wake();
  };
  const shift = (): Doing | undefined => {
    const next = waiting.shift();
    held -= next?.cost ?? 0;
    if (next) takenAt = monotonic();
    if (held < maxHeldInput && ws.isPaused) ws.resume();
    return next?.doing;
  };
  return {
    put(doing, bytes) {
      if (over) return;
      const cost = bytes + messageCost;
      waiting.push({ doing, cost });
      held += cost;
      if (held >= maxHeldInput) ws.pause();
      wake();
    },
    end,
    waitedMs: () => monotonic() - takenAt,
    drop() {
      waiting = [];
      // The client's close must be read.
      ws.resume();
      end();
    },
    async *doings() {
      for (;;) {
        const doing = shift();
        if (doing) yield doing;
        else if (over) return;
        else
          await new Promise<void>((resolve) => {
            wake = resolve;
          });
      }
    },
  };
}

/** One answer at a time; a ping that comes meanwhile needs none (RFC 6455 section 5.5.3). */
function answerPings(ws: WebSocket): void {
  let answering = false;
  ws.on('ping', (data) => {
    if (answering) return;
    answering = true;
    ws.pong(data, false, () => {
      answering = false;
    });
  });
}

/** Asks for a sign of life, and ends a socket that gives none; one that we do not read cannot give any for a while. */
function watchLife(ws: WebSocket, inbox: Inbox): () => void {
  let unanswered = 0;
  const sign = (): void => {
    unanswered = 0;
  };
  for (const event of ['message', 'ping', 'pong'] as const) ws.on(event, sign);
  return every(pingMs, () => {
    if (ws.isPaused && inbox.waitedMs() >= stuckMs) {
      inbox.drop();
      return ws.close(closeCodes.fell_behind, 'what was typed is not taken; attach again');
    }
    if (ws.isPaused) sign();
    if (unanswered >= maxUnanswered) return ws.terminate();
    unanswered += 1;
    ws.ping();
  });
}

// Attaches the SDK to the terminal of a session over a WebSocket. Receives output, and sends input, sizes and signals.
import { closeCodes } from '../api/close-codes.ts';
import type { BrokerMessage, ClientMessage } from '../api/terminal-websocket.ts';
import { sleep } from '../clock.ts';
import { parsed, propertyOf } from './errors-and-envelopes.ts';

type End = Omit<BrokerMessage & { type: 'end' }, 'type'>;

/**
 * Why this client is no longer attached.
 * - `ended`: the session is over
 * - `lost`: the connection broke, and `message` says why
 * In all cases except `ended`, the session goes on. A new attach with the `offset` of this terminal continues the
 * output at the next byte.
 */
export type Ending = ({ why: 'ended' } & End) | { why: ClosedBy } | { why: 'lost'; message: string };

/** Any message of the broker except output and the end, such as a size that another client set. */
export type TerminalNote = Exclude<BrokerMessage, { type: 'end' }>;

export interface TerminalSettings {
  /** Called with every note, including the first, `ready`. */
  onNote?: (note: TerminalNote) => void;
  /** Detaches the terminal when the signal fires. */
  signal?: AbortSignal;
}

/** An attached terminal. After its end its methods do nothing. */
export interface Terminal {
  readonly client_id: string;
  /** The size of the terminal when it was attached. */
  readonly cols: number;
  readonly rows: number;
  /** Offset of the next byte that `output` yields, counted from the start of the session's output. */
  readonly offset: number;
  /**
   * The output, for one reader, until the terminal ends. Reading a piece acknowledges the previous piece. The broker
   * sends at most 256 KiB beyond the acknowledged output.
   */
  readonly output: AsyncIterable<Uint8Array>;
  /** Resolves with the reason when the terminal ends. Never rejects. */
  readonly ended: Promise<Ending>;
  /** Sends input to the terminal in the order of the calls. Resolves when at most 1 MiB is unsent. */
  write(input: string | Uint8Array): Promise<void>;
  resize(cols: number, rows: number): void;
  /** Sends a signal to the foreground process. */
  signal(name: (ClientMessage & { type: 'signal' })['signal']): void;
  /** Disconnects from the session, which continues on the machine. */
  detach(): void;
}

/**
 * Maximum bytes of unread output. Above this, the client disconnects. Only a broker of version 0.1.0 sends so much,
 * because it accepts no acknowledgements.
 */
const maxUnreadOutput = 16 * 1024 * 1024;
/** Bytes of unsent input above which write() waits. */
const maxUnsentInput = 1024 * 1024;
const pollMs = 10;
/** Bytes of input per message, well below the broker's limit. */
const messageBytes = 64 * 1024;
/**
 * Number of acknowledgements that a client sends for each window of output. A window is the number of bytes that the
 * broker sends without an acknowledgement.
 */
const reportsPerWindow = 8;

/**
 * Resolves when the broker reports that the terminal is ready. Rejects if the terminal cannot be opened. The error's
 * `cause` is an Ending with the reason.
 */
export function openTerminal(socket: WebSocket, settings: TerminalSettings = {}): Promise<Terminal> {
  socket.binaryType = 'arraybuffer';
  const { signal } = settings;
  const output = new OutputBuffer();
  const { promise: ended, resolve: end } = Promise.withResolvers<Ending>();
  let ending: Ending | undefined;
  const finish = (why: Ending): void => {
    ending ??= why;
    signal?.removeEventListener('abort', detach);
    output.end();
    end(ending);
  };
  const close = (why: Ending): void => {
    // The close event is not awaited: over a dead connection it never comes.
    finish(why);
    socket.close(1000);
  };
  const detach = (): void => close({ why: 'detached' });
  socket.addEventListener('close', ({ code, reason }) => finish(endingOf(code, reason)));
  // No handling is needed: the close event that follows has the reason.
  socket.addEventListener('error', () => {});
  signal?.addEventListener('abort', detach);
  if (signal?.aborted) detach();
  return new Promise((resolve, reject) => {
    socket.addEventListener('message', ({ data }) => {
      if (data instanceof ArrayBuffer) {
        if (!ending && !output.add(new Uint8Array(data))) close({ why: 'fell_behind' });
        return;
      }
      const message = messageOf(String(data));
      if (!message) return;
      if (message.type === 'end') {
        const { type: _, ...end } = message;
        ending ??= { why: 'ended', ...end };
        return;
      }
      if (message.type === 'ready') {
        output.startAt(message.offset);
        resolve(terminalOf(socket, message, { output, ended, detach }));
      }
      settings.onNote?.(message);
    });
    void ended.then((cause) =>
      reject(new Error(`the terminal cannot be opened: ${explain(cause)}`, { cause })),
    );
  });
}

const types: Readonly<Record<BrokerMessage['type'], true>> = {
  ready: true,
  status: true,
  size: true,
  refused: true,
  end: true,
};

/** Parses a text message. Returns undefined for an unknown type, which a newer broker may send. */
function messageOf(text: string): BrokerMessage | undefined {
  const value = parsed(text);
  // The cast is safe: the broker sends the fields of BrokerMessage. They are not validated, because the SDK has no zod.
  return Object.hasOwn(types, String(propertyOf(value, 'type'))) ? (value as BrokerMessage) : undefined;
}

const closedBy = ['stopping', 'detached', 'forbidden', 'fell_behind'] as const;
type ClosedBy = (typeof closedBy)[number];

function endingOf(code: number, reason: string): Ending {
  const why = closedBy.find((name) => closeCodes[name] === code);
  return why ? { why } : { why: 'lost', message: reason || 'the connection broke' };
}

function explain(ending: Ending): string {
  if (ending.why === 'ended') return 'the session ended';
  return ending.why === 'lost'
    ? `${ending.message}; a stream_url can be used once, within 30 seconds`
    : ending.why.replace('_', ' ');
}

interface TerminalParts {
  output: OutputBuffer;
  ended: Promise<Ending>;
  detach(): void;
}

function terminalOf(
  socket: WebSocket,
  { client_id, cols, rows, window }: BrokerMessage & { type: 'ready' },
  { output, ended, detach }: TerminalParts,
): Terminal {
  const send = (data: string | Uint8Array<ArrayBuffer>): void => {
    if (socket.readyState === socket.OPEN) socket.send(data);
  };
  const sendMessage = (message: ClientMessage): void => send(JSON.stringify(message));
  if (window !== undefined)
    output.report(window / reportsPerWindow, (offset) => sendMessage({ type: 'received', offset }));
  return {
    client_id,
    cols,
    rows,
    get offset() {
      return output.offset;
    },
    output: output.read(),
    ended,
    async write(input) {
      const bytes = typeof input === 'string' ? new TextEncoder().encode(input) : new Uint8Array(input);
      for (let at = 0; at < bytes.length; at += messageBytes) send(bytes.subarray(at, at + messageBytes));
      // A WebSocket has no event for sent data, so the number of unsent bytes is polled.
      while (socket.readyState === socket.OPEN && socket.bufferedAmount > maxUnsentInput) await sleep(pollMs);
    },
    resize: (width, height) => sendMessage({ type: 'resize', cols: width, rows: height }),
    signal: (name) => sendMessage({ type: 'signal', signal: name }),
    detach,
  };
}

/** A piece of output. `end` is the offset of the byte after it. */
type Chunk = { end: number; bytes: Uint8Array };

/** Stores received output until its reader reads it. */
class OutputBuffer {
  /** Offset of the next byte to be read, in the session's output. */
  offset = 0;
  /** Offset of the next byte to be received. */
  #next = 0;
  #controller: ReadableStreamDefaultController<Chunk> | undefined;
  readonly #stream: ReadableStream<Chunk>;
  #processed = (): void => {};

  constructor() {
    const start = (controller: ReadableStreamDefaultController<Chunk>): void => {
      this.#controller = controller;
    };
    const limit = { highWaterMark: maxUnreadOutput, size: ({ bytes }: Chunk) => bytes.length };
    this.#stream = new ReadableStream({ start }, limit);
  }

  /** Sets the offset, in the session's output, at which the next bytes of add() begin. */
  startAt(offset: number): void {
    this.#next = offset;
    if (this.#controller?.desiredSize === maxUnreadOutput) this.offset = offset;
  }

  /** Adds received bytes. Returns false if the buffer is full. */
  add(bytes: Uint8Array): boolean {
    if ((this.#controller?.desiredSize ?? 0) < bytes.length) return false;
    this.#next += bytes.length;
    this.#controller?.enqueue({ end: this.#next, bytes });
    return true;
  }

  end(): void {
    this.#controller?.close();
    this.#controller = undefined;
  }

  /**
   * Sends the current offset now. Sends it again each time the reader has processed at least `stepBytes` bytes since
   * the last sent offset.
   */
  report(stepBytes: number, send: (offset: number) => void): void {
    let sent = this.offset;
    send(sent);
    this.#processed = () => {
      if (this.offset - sent < stepBytes) return;
      sent = this.offset;
      send(sent);
    };
  }

  async *read(): AsyncGenerator<Uint8Array> {
    const reader = this.#stream.getReader();
    for (let next = await reader.read(); !next.done; next = await reader.read()) {
      this.offset = next.value.end;
      yield next.value.bytes;
      this.#processed();
    }
  }
}

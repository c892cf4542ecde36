// A terminal in the SDK: the WebSocket of an attach, as output to read and things to do.
import { type BrokerMessage, brokerMessage, type ClientMessage, closeCodes } from '../api/terminal.ts';
import { sleep } from '../clock.ts';

type End = Omit<BrokerMessage & { type: 'end' }, 'type'>;

/**
 * Why a terminal ended. Only after `ended` is its session over; all others may attach again, with `offset` to go on
 * where they were. `lost`: the connection broke, or the broker closed it for a reason of its own (`message`).
 */
export type Ending =
  | ({ why: 'ended' } & End)
  | { why: 'detached' | 'forbidden' | 'fell_behind' | 'stopping' }
  | { why: 'lost'; message: string };

/** What is told besides output: the size another client has set, the machine going and coming, what was refused. */
export type TerminalNote = Exclude<BrokerMessage, { type: 'end' }>;

export interface TerminalSettings {
  /** Called with each note, the first one (`ready`) included. */
  onNote?: (note: TerminalNote) => void;
  /** Fires: the terminal is detached. */
  signal?: AbortSignal;
}

/** An attached terminal. Doing something with one that has ended does nothing. */
export interface Terminal {
  readonly client_id: string;
  /** The size of the terminal when it was attached. */
  readonly cols: number;
  readonly rows: number;
  /** Where in the session’s output the next byte lies that `output` gives. */
  readonly offset: number;
  /**
   * The bytes of the terminal, for one reader; ends with it. A WebSocket cannot be slowed down: what is not read is
   * held here, and at 16 MiB the terminal ends as `fell_behind`.
   */
  readonly output: AsyncIterable<Uint8Array>;
  /** Never rejects. */
  readonly ended: Promise<Ending>;
  /** Types something. Resolves when more may be written without filling the memory; order is kept without waiting. */
  write(input: string | Uint8Array): Promise<void>;
  resize(cols: number, rows: number): void;
  /** For what runs in the foreground. */
  signal(name: (ClientMessage & { type: 'signal' })['signal']): void;
  /** Leaves; the session goes on. */
  detach(): void;
}

/** Output that nobody has read yet. */
const maxHeldOutput = 16 * 1024 * 1024;
/** Input that is still to be sent, when write() begins to wait. */
const maxHeldInput = 1024 * 1024;
const drainLookMs = 10;
/** Of one message: well below what the broker takes. */
const pieceBytes = 64 * 1024;

/** Resolves when the broker says that the terminal is ready; rejects when it cannot be had. */
export function openTerminal(socket: WebSocket, settings: TerminalSettings): Promise<Terminal> {
  socket.binaryType = 'arraybuffer';
  const { signal } = settings;
  const held = openHold();
  let ending: Ending | undefined;
  const close = (why: Ending): void => {
    ending ??= why;
    socket.close(1000);
  };
  const leave = (): void => close({ why: 'detached' });
  const ended = new Promise<Ending>((resolve) => {
    socket.addEventListener('close', ({ code, reason }) => {
      signal?.removeEventListener('abort', leave);
      held.end();
      resolve(ending ?? endingOf(code, reason));
    });
  });
  // What is said there is said by the close that follows, too.
  socket.addEventListener('error', () => {});
  signal?.addEventListener('abort', leave);
  if (signal?.aborted) leave();
  return new Promise((resolve, reject) => {
    socket.addEventListener('message', ({ data }) => {
      if (data instanceof ArrayBuffer) {
        if (!ending && !held.put(new Uint8Array(data))) close({ why: 'fell_behind' });
        return;
      }
      const message = messageOf(String(data));
      if (message?.type === 'end') ending ??= endOf(message);
      if (!message || message.type === 'end') return;
      if (message.type === 'ready') {
        held.mark(message.offset);
        resolve(terminalOf(socket, message, { held, ended, leave }));
      }
      settings.onNote?.(message);
    });
    void ended.then((why) => reject(new Error(`the terminal cannot be opened: ${explain(why)}`)));
  });
}

function messageOf(text: string): BrokerMessage | undefined {
  try {
    return brokerMessage.safeParse(JSON.parse(text)).data;
  } catch {
    return undefined;
  }
}

function endOf({ type: _, ...end }: BrokerMessage & { type: 'end' }): Ending {
  return { why: 'ended', ...end };
}

const whyByCode = new Map<number, 'stopping' | 'detached' | 'forbidden' | 'fell_behind'>([
  [closeCodes.stopping, 'stopping'],
  [closeCodes.detached, 'detached'],
  [closeCodes.forbidden, 'forbidden'],
  [closeCodes.fell_behind, 'fell_behind'],
]);

function endingOf(code: number, reason: string): Ending {
  const why = whyByCode.get(code);
  return why ? { why } : { why: 'lost', message: reason || 'the connection broke' };
}

function explain(ending: Ending): string {
  if (ending.why === 'ended') return 'the session ended';
  return ending.why === 'lost'
    ? `${ending.message}; an attach is good once, within 30 seconds`
    : ending.why.replace('_', ' ');
}

interface Attached {
  held: Hold;
  ended: Promise<Ending>;
  leave(): void;
}

function terminalOf(
  socket: WebSocket,
  { client_id, cols, rows }: BrokerMessage & { type: 'ready' },
  { held, ended, leave }: Attached,
): Terminal {
  const send = (data: string | Uint8Array<ArrayBuffer>): void => {
    if (socket.readyState === socket.OPEN) socket.send(data);
  };
  const say = (message: ClientMessage): void => send(JSON.stringify(message));
  return {
    client_id,
    cols,
    rows,
    get offset() {
      return held.offset;
    },
    output: held.read(),
    ended,
    async write(input) {
      const bytes = typeof input === 'string' ? new TextEncoder().encode(input) : new Uint8Array(input);
      for (let at = 0; at < bytes.length; at += pieceBytes) send(bytes.subarray(at, at + pieceBytes));
      // A WebSocket does not tell when it has sent something.
      while (socket.readyState === socket.OPEN && socket.bufferedAmount > maxHeldInput)
        await sleep(drainLookMs);
    },
    resize: (width, height) => say({ type: 'resize', cols: width, rows: height }),
    signal: (name) => say({ type: 'signal', signal: name }),
    detach: leave,
  };
}

interface Hold {
  /** Of the next byte to be read. */
  readonly offset: number;
  /** What is put from now on begins there. */
  mark(offset: number): void;
  /** False: there is too much. */
  put(bytes: Uint8Array): boolean;
  end(): void;
  read(): AsyncIterable<Uint8Array>;
}

/** Output between the WebSocket and its reader. */
function openHold(): Hold {
  const waiting: { at: number; bytes: Uint8Array }[] = [];
  let [size, next, read] = [0, 0, 0];
  let over = false;
  let wake = (): void => {};
  return {
    get offset() {
      return read;
    },
    mark(offset) {
      next = offset;
      if (waiting.length === 0) read = offset;
    },
    put(bytes) {
      if (size + bytes.length > maxHeldOutput) return false;
      waiting.push({ at: next, bytes });
      size += bytes.length;
      next += bytes.length;
      wake();
      return true;
    },
    end() {
      over = true;
      wake();
    },
    async *read() {
      for (;;) {
        const first = waiting.shift();
        if (first) {
          size -= first.bytes.length;
          read = first.at + first.bytes.length;
          yield first.bytes;
        } else if (over) return;
        else {
          await new Promise<void>((resolve) => {
            wake = resolve;
          });
        }
      }
    },
  };
}

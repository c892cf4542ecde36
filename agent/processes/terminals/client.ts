// One client of a terminal: sends it output as fast as it reads, and takes its input, sizes and signals.
import type { AttachTerminalRequest__Output } from '../../../proto/types/farhand/agent/v1/AttachTerminalRequest.ts';
import type { AttachTerminalResponse } from '../../../proto/types/farhand/agent/v1/AttachTerminalResponse.ts';
import type { ReaderPosition, Wake } from '../../../shared/backpressure.ts';
import { AppError } from '../../../shared/errors.ts';
import { terminalReplayBytes } from '../../../shared/limits.ts';
import { isSignal } from '../../../shared/signals.ts';
import type { Running } from '../running-process.ts';
import { signalForeground } from '../tree.ts';
import type { Pty } from './pty.ts';
import { checkedSize, type Size } from './pty.ts';
import { fellOut, type Scrollback } from './scrollback.ts';

/** Largest piece of output. */
const pieceBytes = 64 * 1024;
/** Input of one client that may wait for the program before its call is no longer read. */
const queuedBytes = 64 * 1024;
/** Input is acknowledged along with output, and after so many bytes without any: an echo costs no extra message. */
const acknowledgeBytes = 8 * 1024;

/** Why a client's call is over before its terminal: it went, the link did, or it did something wrong. */
export type Parting = 'left' | 'lost' | AppError;

/** A terminal as its clients see it; `changed` wakes them after every change. */
export interface Watched {
  readonly changed: Wake;
  readonly output: Scrollback;
  readonly size: Size;
  readonly pty?: Pty;
  readonly running: Running | undefined;
  readonly exit: object | undefined;
  resize(size: Size, by: Client): void;
}

export class Client {
  /** Up to where it has taken the output. */
  readonly place: ReaderPosition;
  readonly #terminal: Watched;
  /** Next byte to send. */
  #position: number;
  #news: Size | undefined;
  #queued = 0;
  /** It was attached in an earlier call. */
  readonly #known: boolean;
  /** Bytes of input that the terminal has, of all its calls: what is queued is written as long as that lives. */
  #received: number;
  #acknowledged = 0;
  /** Its call is not read, so its acknowledgements of output do not arrive either. */
  #paused = false;
  #parting: Parting | undefined;

  /** `from`: an offset that is stored. `before`: the same client in its last call, which is over. */
  constructor(terminal: Watched, from: number, before: Client | undefined) {
    this.#terminal = terminal;
    this.#position = from;
    this.#known = before !== undefined;
    this.#received = before ? before.#received : 0;
    this.place = terminal.output.pace.join(from);
  }

  get parting(): Parting | undefined {
    return this.#parting;
  }

  /** The first reason counts. */
  end(parting: Parting): void {
    this.#parting ??= parting;
    this.#terminal.changed.wake();
  }

  sendSize(size: Size): void {
    this.#news = size;
  }

  /** All messages to it, until the terminal or its call has ended. */
  async *answers(signal: AbortSignal): AsyncGenerator<AttachTerminalResponse> {
    const { output, changed } = this.#terminal;
    this.#acknowledged = this.#received;
    const head = { offset: this.#position, size: this.#terminal.size, known: this.#known };
    yield { head, input_taken: this.#acknowledged };
    while (!signal.aborted) {
      // Looked at before reading: once it is set, all output is there.
      const { exit } = this.#terminal;
      if (this.#parting instanceof AppError) throw this.#parting;
      if (this.#parting) return;
      if (this.#position < output.start) throw fellOut(output, this.#position);
      const next = this.#next();
      if (next) yield next;
      else if (exit && this.#position === output.end) return;
      // Both looks and the wait are in one turn, so no wake is missed.
      else await changed.wait(signal);
    }
  }

  #next(): AttachTerminalResponse | undefined {
    const news = this.#seen();
    const unacknowledged = this.#received - this.#acknowledged;
    if (unacknowledged === 0 || (!news && unacknowledged < acknowledgeBytes)) return news;
    this.#acknowledged = this.#received;
    return { ...news, input_taken: this.#acknowledged };
  }

  #seen(): AttachTerminalResponse | undefined {
    const size = this.#news;
    this.#news = undefined;
    if (size) return { size };
    // A program that waits for its output to be taken reads no input: else the two would wait for each other.
    if (this.#paused) this.#acknowledge(this.#position);
    const room = this.place.position + terminalReplayBytes - this.#position;
    const data = this.#terminal.output.read(this.#position, Math.min(room, pieceBytes));
    if (data.length === 0) return undefined;
    const offset = this.#position;
    this.#position += data.length;
    return { output: { offset, data } };
  }

  /** Resolves when there may be more: a program that does not read delays the clients that type. */
  async take({ input, size, signal, taken, open }: AttachTerminalRequest__Output): Promise<void> {
    if (this.#parting) return;
    const terminal = this.#terminal;
    if (open) throw new AppError('invalid_request', 'a client is open already');
    if (size) terminal.resize(checkedSize(size), this);
    if (signal) this.#signal(signal);
    if (taken !== undefined) this.#acknowledge(taken);
    if (input) await this.#type(input);
  }

  async #type(input: Uint8Array): Promise<void> {
    this.#queued += input.length;
    this.#received += input.length;
    if (this.#received - this.#acknowledged >= acknowledgeBytes) this.#terminal.changed.wake();
    const written = this.#terminal.pty?.write(input).then(() => {
      this.#queued -= input.length;
    });
    if (this.#queued <= queuedBytes) return;
    this.#paused = true;
    this.#terminal.changed.wake();
    await written;
    this.#paused = false;
  }

  #acknowledge(taken: number): void {
    const position = Math.min(Math.max(taken, this.place.position), this.#position);
    if (position === this.place.position) return;
    this.#terminal.output.pace.moved(this.place, position);
    this.#terminal.changed.wake();
  }

  #signal(name: string): void {
    if (!isSignal(name)) throw new AppError('invalid_request', `no signal that may be sent: ${name}`);
    const { running } = this.#terminal;
    // Without a process in the foreground there is nothing to signal.
    if (running) signalForeground(running, name);
  }
}

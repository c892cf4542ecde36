// One client of a terminal: sends output to the client as fast as it reads, and takes its input, sizes and
// signals.
import type { AttachTerminalRequest__Output } from '../../../proto/types/farhand/agent/v1/AttachTerminalRequest.ts';
import type { AttachTerminalResponse } from '../../../proto/types/farhand/agent/v1/AttachTerminalResponse.ts';
import type { ReaderPosition, Wake } from '../../../shared/backpressure.ts';
import { AppError } from '../../../shared/errors.ts';
import { terminalReplayBytes } from '../../../shared/process-limits.ts';
import { isSignal } from '../../../shared/signals.ts';
import { signalForeground } from '../kill-tree.ts';
import type { Running } from '../running-process.ts';
import type { Pty } from './pty.ts';
import { checkedSize, type Size } from './pty.ts';
import { fellOut, type Scrollback } from './scrollback.ts';

/** Most bytes of output in one message. */
const pieceBytes = 64 * 1024;
/** Most bytes of input that may wait for the program before the client's call is no longer read. */
const queuedBytes = 64 * 1024;
/** Input is acknowledged along with output, so an echo costs no extra message, or after this many bytes. */
const acknowledgeBytes = 8 * 1024;

/**
 * Why a client's call ended before its terminal: the client left, its link was lost, or it caused an error.
 */
export type Parting = 'left' | 'lost' | AppError;

/** The parts of a terminal that a client uses. `changed` wakes all clients after every change. */
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
  /** Offset up to which the client has acknowledged the output. */
  readonly place: ReaderPosition;
  readonly #terminal: Watched;
  /** Offset of the next byte to send. */
  #position: number;
  #news: Size | undefined;
  #queued = 0;
  /** Whether the client was attached by an earlier call. */
  readonly #known: boolean;
  /** Bytes of input accepted in all calls of the client, including input that waits for the program. */
  #received: number;
  #acknowledged = 0;
  /** While true, the client's call is not read, so no acknowledgements of output arrive either. */
  #paused = false;
  #parting: Parting | undefined;

  /** `from`: a stored offset. `before`: the same client in its last call, which is over. */
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

  /** Ends the client's call. Only the first reason is stored. */
  end(parting: Parting): void {
    this.#parting ??= parting;
    this.#terminal.changed.wake();
  }

  sendSize(size: Size): void {
    this.#news = size;
  }

  /** All messages to the client, until the terminal or the call has ended. */
  async *answers(signal: AbortSignal): AsyncGenerator<AttachTerminalResponse> {
    const { output, changed } = this.#terminal;
    this.#acknowledged = this.#received;
    const head = { offset: this.#position, size: this.#terminal.size, known: this.#known };
    yield { head, input_taken: this.#acknowledged };
    while (!signal.aborted) {
      // Read before the output: once the exit is set, the output is complete.
      const { exit } = this.#terminal;
      if (this.#parting instanceof AppError) throw this.#parting;
      if (this.#parting) return;
      if (this.#position < output.start) throw fellOut(output, this.#position);
      const next = this.#next();
      if (next) yield next;
      else if (exit && this.#position === output.end) return;
      // The checks above and this wait run in one turn of the event loop, so no wake is missed.
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
    // A program that waits until its output is read reads no input. While input is paused, output counts as
    // acknowledged, or client and program would wait for each other.
    if (this.#paused) this.#acknowledge(this.#position);
    const room = this.place.position + terminalReplayBytes - this.#position;
    const data = this.#terminal.output.read(this.#position, Math.min(room, pieceBytes));
    if (data.length === 0) return undefined;
    const offset = this.#position;
    this.#position += data.length;
    return { output: { offset, data } };
  }

  /**
   * Handles one message. Resolves when the next may be read: a program that does not read its input delays
   * it.
   */
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
    // The result is ignored: without a foreground process there is nothing to signal.
    if (running) signalForeground(running, name);
  }
}

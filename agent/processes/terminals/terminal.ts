// One terminal: its output, the calls that keep it alive, and its clients.
import type { AttachTerminalRequest__Output } from '../../../proto/types/farhand/agent/v1/AttachTerminalRequest.ts';
import type { AttachTerminalResponse } from '../../../proto/types/farhand/agent/v1/AttachTerminalResponse.ts';
import { after, sleep } from '../../../shared/clock.ts';
import { terminalReplayBytes } from '../../../shared/command-and-terminal-limits.ts';
import { AppError } from '../../../shared/errors.ts';
import type { ReaderPosition } from '../../../shared/output-backpressure.ts';
import { isSignal } from '../../../shared/signals.ts';
import { signalGroup } from '../kill-tree.ts';
import type { Exit } from '../process-journal.ts';
import { Tracked } from '../process-registry.ts';
import type { Limits } from '../running-process.ts';
import { checkedSize, type Pty, type Size } from './pty.ts';
import { fellOut, Scrollback } from './scrollback.ts';

const pieceBytes = 64 * 1024;
/** After a message of at least this number of bytes of output, the next message waits `collectMs` milliseconds. */
const largeBytes = 2 * 1024;
const collectMs = 5;
/** While more than this number of input bytes wait for the program, the client's messages are not read. */
const queuedBytes = 64 * 1024;
/**
 * Input is acknowledged immediately if at least this number of bytes is unacknowledged. Fewer bytes are acknowledged
 * with the next output.
 */
const acknowledgeBytes = 8 * 1024;

export class Terminal extends Tracked {
  readonly output: Scrollback;
  /** The current size. This default applies until the request or a client sets a size. */
  size: Size = { cols: 80, rows: 24 };
  graceMs = 0;
  pty?: Pty;
  readonly #limits: Limits;
  /**
   * Clients by id. A client whose link was lost stays for a while, because it may attach again. Its unread output still
   * pauses the program.
   */
  readonly #clients = new Map<string, Client>();
  #keepers = 0;
  #stopGrace = (): void => {};
  #stopWaiting = (): void => {};

  constructor(id: string, limits: Limits) {
    super(id);
    this.#limits = limits;
    this.output = new Scrollback(limits.terminalWindowBytes, this.changed);
  }

  /** Number of clients, including clients whose link was lost. */
  get clients(): number {
    return this.#clients.size;
  }

  knows(client: string): boolean {
    return this.#clients.has(client);
  }

  written(): Pick<Exit, 'stdout_bytes' | 'stderr_bytes'> {
    return { stdout_bytes: this.output.end, stderr_bytes: 0 };
  }

  async close(): Promise<void> {
    this.#stopGrace();
    this.#removeLost();
  }

  async remove(): Promise<void> {
    // There is no file to remove: the output of a terminal is only in memory, where clients may still read it.
  }

  /**
   * Keeps the terminal alive until the returned function is called. When all returned functions have been called, the
   * terminal ends after `graceMs` milliseconds, unless keep() is called again before that.
   */
  keep(): () => void {
    this.#keepers += 1;
    this.#stopGrace();
    this.#awaitLost();
    return () => {
      this.#keepers -= 1;
      if (this.#keepers > 0 || this.exit) return;
      this.#stopWaiting();
      const end = (): void => this.running?.kill('abandoned', this.#limits.hangupMs);
      if (this.graceMs > 0) this.#stopGrace = after(this.graceMs, end);
      else end();
    };
  }

  /**
   * Attaches a client. If a client with the same id is attached already, the new one replaces it and continues the
   * count of its accepted input bytes.
   */
  attach(id: string, offset: number | undefined): Client {
    const from = offset ?? this.output.replayFrom();
    if (from < this.output.start || from > this.output.end) throw fellOut(this.output, from);
    const before = this.#clients.get(id);
    before?.end('left');
    const client = new Client(this, from, before);
    if (before) this.#remove(id, before);
    this.#clients.set(id, client);
    return client;
  }

  /** Called when the call of a client has ended. A client whose link was lost may attach again and continue. */
  detach(id: string, client: Client): void {
    if (client.parting !== 'lost' || this.exit) this.#remove(id, client);
    else if (this.#keepers > 0) this.#awaitLost();
  }

  /** Sets the size for all clients. The clients other than `by` are notified. */
  resize(size: Size, by: Client): void {
    this.size = size;
    this.pty?.resize(size);
    for (const client of this.#clients.values()) if (client !== by) client.sendSize(size);
    this.changed.wake();
  }

  /**
   * Waits `heldMs` milliseconds, then removes the clients whose link was lost and that have not attached again. Call
   * this only while the broker keeps the terminal alive, because clients can come back only through the broker.
   */
  #awaitLost(): void {
    this.#stopWaiting();
    this.#stopWaiting = after(this.#limits.heldMs, () => this.#removeLost());
  }

  #removeLost(): void {
    this.#stopWaiting();
    for (const [id, client] of this.#clients) if (client.parting === 'lost') this.#remove(id, client);
  }

  #remove(id: string, client: Client): void {
    this.output.pace.leave(client.place);
    if (this.#clients.get(id) === client) this.#clients.delete(id);
  }
}

/**
 * Why the call of a client ends although the terminal may still run: the client left or attached again, its link was
 * lost, or one of its messages caused an error.
 */
export type Parting = 'left' | 'lost' | AppError;

/** Sends output to the client as fast as the client reads. Receives the client's input, sizes and signals. */
export class Client {
  /** The client's position: the offset up to which it has acknowledged the output. */
  readonly place: ReaderPosition;
  readonly #terminal: Terminal;
  /** Offset of the next byte to send. */
  #position: number;
  #news: Size | undefined;
  #queued = 0;
  /** True if the client was attached by an earlier call. */
  readonly #known: boolean;
  /** Bytes of input accepted in all calls of the client, including bytes that still wait for the program. */
  #received: number;
  #acknowledged = 0;
  /** True while no messages of the client are read, not even its acknowledgements of output. */
  #paused = false;
  #parting: Parting | undefined;

  /**
   * `from`: offset of the first byte to send. attach() has checked that the output from there on is stored.
   * `before`: the Client of the previous attach call with the same id; undefined if there is none.
   */
  constructor(terminal: Terminal, from: number, before: Client | undefined) {
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

  /** Yields all messages to the client, until the terminal or the call has ended. */
  async *answers(signal: AbortSignal): AsyncGenerator<AttachTerminalResponse> {
    const { output, changed } = this.#terminal;
    this.#acknowledged = this.#received;
    const head = { offset: this.#position, size: this.#terminal.size, known: this.#known };
    yield { head, input_taken: this.#acknowledged };
    while (!signal.aborted) {
      // The exit is read before the output: once the exit is set, the output that is read afterwards is complete.
      const { exit } = this.#terminal;
      if (this.#parting instanceof AppError) throw this.#parting;
      if (this.#parting) return;
      if (this.#position < output.start) throw fellOut(output, this.#position);
      const next = this.#next();
      if (next) {
        yield next;
        // Without the wait, every read from the pseudo terminal (at most 4 KiB) would become a message of its own.
        // After a full message, more output is ready, so the next message is sent without a wait.
        const sent = next.output?.data?.length ?? 0;
        if (sent >= largeBytes && sent < pieceBytes) await sleep(collectMs, signal);
      } else if (exit && this.#position === output.end) return;
      // Nothing is awaited between the checks above and this wait, so no call of wake() is missed.
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
    // While input is paused, no message of the client is read, not even an acknowledgement of output. All sent output
    // then counts as acknowledged. Otherwise the program could block in a write of output, and would never read its
    // input.
    if (this.#paused) this.#acknowledge(this.#position);
    const room = this.place.position + terminalReplayBytes - this.#position;
    const data = this.#terminal.output.read(this.#position, Math.min(room, pieceBytes));
    if (data.length === 0) return undefined;
    const offset = this.#position;
    this.#position += data.length;
    return { output: { offset, data } };
  }

  /**
   * Handles one message of the client, and resolves when the next one may be read. If more than `queuedBytes` bytes of
   * input are waiting, it resolves only after the terminal has accepted them.
   */
  async take({ input, size, signal, taken, open }: AttachTerminalRequest__Output): Promise<void> {
    if (this.#parting) return;
    const terminal = this.#terminal;
    if (open) throw new AppError('invalid_request', 'only the first message may contain `open`');
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
    if (!isSignal(name)) throw new AppError('invalid_request', `${name} is not a signal that may be sent`);
    const { running } = this.#terminal;
    if (!running) return;
    try {
      // signalGroup() returns false if the program is gone. The signal is not needed then.
      signalGroup(running.child, name, true);
    } catch (error) {
      // The agent may not signal a program of another user, such as sudo. The client's call goes on, because its end
      // would lose input.
      if (!(error instanceof AppError && error.code === 'permission_denied')) throw error;
    }
  }
}

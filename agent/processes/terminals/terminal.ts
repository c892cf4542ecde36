// One terminal: its output, the calls that keep it alive, and its clients.
import { after } from '../../../shared/clock.ts';
import type { Exit } from '../journal.ts';
import { Tracked } from '../process-table.ts';
import type { Pty, Size } from './pty.ts';
import { fellOut, Scrollback } from './scrollback.ts';
import { Client, type Watched } from './terminal-client.ts';

export interface TerminalLimits {
  terminalWindowBytes: number;
  hangupMs: number;
  heldMs: number;
}

export class Terminal extends Tracked implements Watched {
  readonly output: Scrollback;
  /** The default until a client or the request sets a size. */
  size: Size = { cols: 80, rows: 24 };
  graceMs = 0;
  pty?: Pty;
  readonly #limits: TerminalLimits;
  readonly #clients = new Map<string, Client>();
  /** Clients whose link was lost: the program waits for them, and their counts of input are stored. */
  readonly #held = new Map<string, Client>();
  #keepers = 0;
  #stopGrace = (): void => {};
  #stopWaiting = (): void => {};

  constructor(limits: TerminalLimits) {
    super();
    this.#limits = limits;
    this.output = new Scrollback(limits.terminalWindowBytes, this.changed);
  }

  /** Number of clients, including clients whose link was lost. */
  get clients(): number {
    return this.#clients.size + this.#held.size;
  }

  knows(client: string): boolean {
    return this.#clients.has(client) || this.#held.has(client);
  }

  written(): Pick<Exit, 'stdout_bytes' | 'stderr_bytes'> {
    return { stdout_bytes: this.output.end, stderr_bytes: 0 };
  }

  async close(): Promise<void> {
    this.#stopGrace();
    this.#releaseHeld();
  }

  async remove(): Promise<void> {
    // The output is only in memory, and clients may still be reading it.
  }

  /**
   * Keeps the terminal alive until the returned function is called. After the last such call it ends in
   * `graceMs`.
   */
  keep(): () => void {
    this.#keepers += 1;
    this.#stopGrace();
    this.#awaitHeld();
    return () => {
      this.#keepers -= 1;
      if (this.#keepers > 0 || this.exit) return;
      this.#stopWaiting();
      const end = (): void => this.running?.kill('abandoned', this.#limits.hangupMs);
      if (this.graceMs > 0) this.#stopGrace = after(this.graceMs, end);
      else end();
    };
  }

  /** Attaches a client. It replaces a client with the same id and continues that client's count of input. */
  attach(id: string, offset: number | undefined): Client {
    const from = offset ?? this.output.replayFrom();
    if (from < this.output.start || from > this.output.end) throw fellOut(this.output, from);
    const before = this.#clients.get(id) ?? this.#held.get(id);
    before?.end('left');
    const client = new Client(this, from, before);
    this.#unhold(id);
    this.#clients.set(id, client);
    return client;
  }

  /** `lost`: the link was lost, so the client's place is held for a while. */
  detach(id: string, client: Client, lost: boolean): void {
    const known = this.#clients.get(id) === client && this.#clients.delete(id);
    const held = known && lost && !this.exit;
    if (held) this.#held.set(id, client);
    else this.output.pace.leave(client.place);
    if (held && this.#keepers > 0) this.#awaitHeld();
  }

  /** The last size set by any client counts. All other clients are notified. */
  resize(size: Size, by: Client): void {
    this.size = size;
    this.pty?.resize(size);
    for (const client of this.#clients.values()) if (client !== by) client.sendSize(size);
    this.changed.wake();
  }

  /**
   * Gives the clients that lost their link `heldMs` to return, counted from the return of the broker's call.
   */
  #awaitHeld(): void {
    this.#stopWaiting();
    if (this.#held.size > 0) this.#stopWaiting = after(this.#limits.heldMs, () => this.#releaseHeld());
  }

  #releaseHeld(): void {
    this.#stopWaiting();
    for (const id of [...this.#held.keys()]) this.#unhold(id);
  }

  #unhold(id: string): void {
    const client = this.#held.get(id);
    if (client) this.output.pace.leave(client.place);
    this.#held.delete(id);
  }
}

// What goes to the agent for one client: what it does, one thing after another, and how much output it has taken.
import type { AttachTerminalOpen } from '../../proto/types/farhand/agent/v1/AttachTerminalOpen.ts';
import type { AttachTerminalRequest } from '../../proto/types/farhand/agent/v1/AttachTerminalRequest.ts';
import { after } from '../../shared/clock.ts';
import { Wake } from '../../shared/pace.ts';
import type { Doing } from './client.ts';
import { Typed } from './typed.ts';

/** The agent is told after so many bytes, and when nothing more has come for a while. */
const tellBytes = 32 * 1024;
const tellMs = 50;

interface Waiting {
  message: Doing | { taken: number };
  sent(): void;
}

/** Where a call begins, as the agent tells it. */
interface Beginning {
  /** Of the first byte of output. */
  offset: number;
  /** How much of the input it has, if it counts. */
  input_taken: number | undefined;
  /** It still knows this client from an earlier call. */
  known: boolean;
}

/** Outlives the calls: while there is none, what waits goes on waiting. */
export class Outbox {
  readonly #changed = new Wake();
  readonly #typed = new Typed();
  #waiting: Waiting | undefined;
  /** Before that nobody knows from where on input is to be sent. */
  #begun = false;
  #taken = 0;
  #told = 0;
  #due = false;
  #cancelTell = (): void => {};

  /** Resolves when a call has taken it, or when the signal fires. After a lost link only input is sent again. */
  give(message: Doing, signal: AbortSignal): Promise<void> {
    return new Promise((resolve) => {
      const sent = (): void => {
        signal.removeEventListener('abort', sent);
        resolve();
      };
      if (signal.aborted) return resolve();
      signal.addEventListener('abort', sent, { once: true });
      this.#waiting = { message, sent };
      this.#changed.wake();
    });
  }

  /** The agent has taken the call. Says how many bytes of input may be lost. Throws machine_error. */
  begin({ offset, input_taken, known }: Beginning): number {
    const lost = this.#typed.begin(input_taken, known);
    this.#taken = offset;
    this.#told = offset;
    this.#due = false;
    this.#begun = true;
    this.#changed.wake();
    return lost;
  }

  /** The agent has so much of the input. Throws machine_error. */
  confirm(input_taken: number): void {
    this.#typed.confirm(input_taken);
    if (this.#waiting) this.#changed.wake();
  }

  /** The client has the output up to here. */
  taken(offset: number): void {
    this.#taken = offset;
    this.#cancelTell();
    if (offset - this.#told >= tellBytes) this.#tell();
    else this.#cancelTell = after(tellMs, () => this.#tell());
  }

  /** The requests of one call, until its signal fires. */
  requests(open: AttachTerminalOpen, signal: AbortSignal): AsyncGenerator<AttachTerminalRequest> {
    this.#begun = false;
    return this.#requests(open, signal);
  }

  async *#requests(open: AttachTerminalOpen, signal: AbortSignal): AsyncGenerator<AttachTerminalRequest> {
    yield { open };
    while (!signal.aborted) {
      const next = this.#begun ? this.#next() : undefined;
      if (!next) await this.#changed.wait(signal);
      else
        try {
          yield next.message;
        } finally {
          next.sent();
        }
    }
  }

  #next(): Waiting | undefined {
    if (this.#due) {
      this.#due = false;
      this.#told = this.#taken;
      return { message: { taken: this.#taken }, sent() {} };
    }
    const again = this.#typed.again();
    if (again) return { message: { input: again }, sent() {} };
    const waiting = this.#waiting;
    if (waiting && 'input' in waiting.message) {
      const { input } = waiting.message;
      if (!this.#typed.fits(input.length)) return undefined;
      this.#typed.sending(input);
    }
    this.#waiting = undefined;
    return waiting;
  }

  close(): void {
    this.#cancelTell();
  }

  #tell(): void {
    this.#due = true;
    this.#changed.wake();
  }
}

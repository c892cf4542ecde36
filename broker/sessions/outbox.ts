// What goes to the agent for one client: what it does, one thing after another, and how much output it has taken.
import type { AttachTerminalOpen } from '../../proto/types/farhand/agent/v1/AttachTerminalOpen.ts';
import type { AttachTerminalRequest } from '../../proto/types/farhand/agent/v1/AttachTerminalRequest.ts';
import { after } from '../../shared/clock.ts';
import { Wake } from '../../shared/pace.ts';

/** The agent is told after so many bytes, and when nothing more has come for a while. */
const tellBytes = 32 * 1024;
const tellMs = 50;

interface Waiting {
  message: AttachTerminalRequest;
  sent(): void;
}

/** Outlives the calls: while there is none, what waits goes on waiting. */
export class Outbox {
  readonly #changed = new Wake();
  #waiting: Waiting | undefined;
  #taken = 0;
  #told = 0;
  #due = false;
  #cancelTell = (): void => {};

  /** Resolves when a call has taken it, which is the only one that sends it, or when the signal fires. */
  give(message: AttachTerminalRequest, signal: AbortSignal): Promise<void> {
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

  /** Output begins here. */
  begin(offset: number): void {
    this.#taken = offset;
    this.#told = offset;
    this.#due = false;
  }

  /** The client has the output up to here. */
  taken(offset: number): void {
    this.#taken = offset;
    this.#cancelTell();
    if (offset - this.#told >= tellBytes) this.#tell();
    else this.#cancelTell = after(tellMs, () => this.#tell());
  }

  /** The requests of one call, until its signal fires. */
  async *requests(open: AttachTerminalOpen, signal: AbortSignal): AsyncGenerator<AttachTerminalRequest> {
    yield { open };
    while (!signal.aborted) {
      const waiting = this.#waiting;
      if (this.#due) {
        this.#due = false;
        this.#told = this.#taken;
        yield { taken: this.#taken };
      } else if (waiting) {
        this.#waiting = undefined;
        try {
          yield waiting.message;
        } finally {
          waiting.sent();
        }
      } else await this.#changed.wait(signal);
    }
  }

  close(): void {
    this.#cancelTell();
  }

  #tell(): void {
    this.#due = true;
    this.#changed.wake();
  }
}

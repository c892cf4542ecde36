// The input of a terminal client that its agent has not acknowledged yet, so that it reaches the terminal once, also over
// a new link.
import type { AttachTerminalOpen } from '../../proto/types/farhand/agent/v1/AttachTerminalOpen.ts';
import type { AttachTerminalRequest } from '../../proto/types/farhand/agent/v1/AttachTerminalRequest.ts';
import type { TerminalSize } from '../../proto/types/farhand/agent/v1/TerminalSize.ts';
import { AppError } from '../../shared/errors.ts';
import { Wake } from '../../shared/wait-for-change.ts';
import type { Action } from './terminal-client.ts';

/**
 * Maximum number of unacknowledged bytes of input. Beyond it, the broker sends no input until the agent acknowledges
 * some.
 */
const mostUnacknowledged = 64 * 1024;
/**
 * Maximum number of bytes of input in one message to the agent. The number is also used for output: whenever the client
 * has received this many more bytes, the broker reports the new offset to the agent.
 */
const pieceBytes = 32 * 1024;

/** The agent's first answer to a call: the offsets at which output and input continue. */
interface Beginning {
  /** Offset of the first byte of output that the agent sends in this call. */
  offset: number;
  /** Bytes of input that the agent has. */
  input_taken: number;
  /** True if the agent remembers this client from an earlier call. */
  known: boolean;
}

/**
 * The unacknowledged input of one client, which is sent again after a lost link. Offsets of input continue across
 * calls.
 */
export class UnacknowledgedInput {
  readonly #changed = new Wake();
  /** The next action of the client, which waits while too much input is unacknowledged. */
  #waiting: Action | undefined;
  /** The last size of the terminal, which a lost link did not deliver. It is sent first. */
  #size: TerminalSize | undefined;
  /** All input after byte `#acknowledged`, in one buffer. Many small buffers would need far more memory. */
  #input: Buffer = Buffer.alloc(0);
  #acknowledged = 0;
  /** Offset of the next byte of input to send. */
  #next = 0;
  /** True once the agent has reported at which offsets of output and input this call begins. */
  #begun = false;
  /**
   * `#taken` is the offset after the last byte of output that the client has received. `#reported` is the last value of
   * `#taken` that was sent to the agent.
   */
  #taken = 0;
  #reported = 0;

  /**
   * Resolves when the action has been sent to the agent, or its input has been added to `#input`. Also resolves when
   * `signal` fires. After a lost link, only input is sent again, no other action.
   */
  async send(action: Action, signal: AbortSignal): Promise<void> {
    this.#waiting = action;
    this.#changed.wake();
    while (this.#waiting && !signal.aborted) await this.#changed.wait(signal);
  }

  /**
   * Handles the agent's first answer to a call. Returns the number of bytes of input that may be lost. Throws
   * machine_error if the agent remembers the client, but reports more input than the broker took from the client.
   */
  begin({ offset, input_taken, known }: Beginning, size: TerminalSize | undefined): number {
    this.#size = size;
    const resumes = known && input_taken >= this.#acknowledged;
    // If the agent has forgotten the client, it is unknown which input arrived. This input is not sent again, because a
    // command that is sent twice could run twice.
    const lost = resumes ? 0 : this.#next - this.#acknowledged;
    if (resumes) {
      this.#next = this.#acknowledged + this.#input.length;
      this.acknowledge(input_taken);
    } else {
      this.#input = this.#input.subarray(lost);
      this.#acknowledged = input_taken;
    }
    this.#next = this.#acknowledged;
    this.#taken = offset;
    this.#reported = offset;
    this.#begun = true;
    this.#changed.wake();
    return lost;
  }

  /** Drops input that the agent has acknowledged. Throws machine_error if `input_taken` is more than was sent. */
  acknowledge(input_taken: number): void {
    if (input_taken > this.#next) {
      const details = { sent: this.#next, reported: input_taken };
      const message = 'the agent acknowledged more bytes of input than the broker has sent';
      throw new AppError('machine_error', message, details);
    }
    if (input_taken <= this.#acknowledged) return;
    this.#input = this.#input.subarray(input_taken - this.#acknowledged);
    this.#acknowledged = input_taken;
    if (this.#waiting) this.#changed.wake();
  }

  /** Records that the client has received the output up to this offset. */
  taken(offset: number): void {
    this.#taken = offset;
    if (offset - this.#reported >= pieceBytes) this.#changed.wake();
  }

  /** Yields the requests of one call until its signal fires. */
  async *requests(open: AttachTerminalOpen, signal: AbortSignal): AsyncGenerator<AttachTerminalRequest> {
    this.#begun = false;
    yield { open };
    while (!signal.aborted) {
      // Input is sent only after the agent has reported how many bytes of input it already has.
      const request = this.#begun ? this.#request() : undefined;
      if (request) yield request;
      else await this.#changed.wait(signal);
    }
  }

  #request(): AttachTerminalRequest | undefined {
    if (this.#taken - this.#reported >= pieceBytes) {
      this.#reported = this.#taken;
      return { taken: this.#taken };
    }
    const size = this.#size;
    this.#size = undefined;
    if (size) return { size };
    const waiting = this.#waiting;
    if (waiting && 'input' in waiting) this.#append(waiting.input);
    const at = this.#next - this.#acknowledged;
    if (at < this.#input.length) {
      const input = this.#input.subarray(at, at + pieceBytes);
      this.#next += input.length;
      return { input };
    }
    if (!waiting || 'input' in waiting) return undefined;
    this.#setWaiting(undefined);
    return waiting;
  }

  /** Appends as much of the input to the buffer as fits. The rest waits in `#waiting`. */
  #append(input: Uint8Array): void {
    const free = mostUnacknowledged - this.#input.length;
    this.#input = Buffer.concat([this.#input, input.subarray(0, free)]);
    this.#setWaiting(input.length > free ? { input: input.subarray(free) } : undefined);
  }

  #setWaiting(rest: Action | undefined): void {
    this.#waiting = rest;
    if (!rest) this.#changed.wake();
  }
}

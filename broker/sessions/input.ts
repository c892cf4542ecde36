// What goes to the agent for one client: its unacknowledged input, which a lost link sends again, and how far it has read.
import type { AttachTerminalOpen } from '../../proto/types/farhand/agent/v1/AttachTerminalOpen.ts';
import type { AttachTerminalRequest } from '../../proto/types/farhand/agent/v1/AttachTerminalRequest.ts';
import { AppError } from '../../shared/errors.ts';
import { Wake } from '../../shared/pace.ts';
import type { Doing } from './client.ts';

/** While so many bytes of input are unacknowledged, nothing more is sent. */
const mostBytes = 64 * 1024;
/** Input goes to the agent in pieces of this size, and every so many bytes of output it hears what was taken. */
const pieceBytes = 32 * 1024;

/** Where a call begins, as the agent reports it. */
interface Beginning {
  /** Of the first byte of output. */
  offset: number;
  /** How much of the input it has; undefined: this agent does not count. */
  input_taken: number | undefined;
  /** It still knows this client from an earlier call. */
  known: boolean;
}

/** Outlives the calls: between two of them everything waits. Input is counted in bytes over all calls of the client. */
export class AgentInput {
  readonly #changed = new Wake();
  /** What the client does next; not taken while too much input is unacknowledged. */
  #waiting: Doing | undefined;
  /** Input from #acknowledged on. One piece: many small ones would cost far more than they hold. */
  #input: Buffer = Buffer.alloc(0);
  #acknowledged = 0;
  /** Next byte of input to send. */
  #next = 0;
  #counted = false;
  /** The agent has said where this call begins. */
  #begun = false;
  /** Offset of the output that the client has taken, and what the agent was told of it. */
  #taken = 0;
  #reported = 0;

  /** Resolves when a call has taken it, or the signal fires. After a lost link only input is sent again. */
  async send(doing: Doing, signal: AbortSignal): Promise<void> {
    this.#waiting = doing;
    this.#changed.wake();
    while (this.#waiting && !signal.aborted) await this.#changed.wait(signal);
  }

  /** The agent has taken the call. Returns how many bytes of input may be lost. Throws machine_error. */
  begin({ offset, input_taken, known }: Beginning): number {
    const from = this.#counted && known ? input_taken : undefined;
    const resumes = from !== undefined && from >= this.#acknowledged;
    // An agent that has forgotten the client may have taken all that was sent: that must not come twice.
    const lost = resumes ? 0 : this.#next - this.#acknowledged;
    if (resumes) {
      this.#next = this.#acknowledged + this.#input.length;
      this.acknowledge(from);
    } else {
      this.#counted = input_taken !== undefined;
      this.#input = this.#input.subarray(lost);
      this.#acknowledged = input_taken ?? 0;
    }
    this.#next = this.#acknowledged;
    this.#taken = offset;
    this.#reported = offset;
    this.#begun = true;
    this.#changed.wake();
    return lost;
  }

  /** The agent has so much of the input. Throws machine_error when it cannot. */
  acknowledge(input_taken: number): void {
    if (input_taken > this.#next) {
      const details = { sent: this.#next, told: input_taken };
      throw new AppError('machine_error', 'the machine has more input than it was sent', details);
    }
    if (input_taken <= this.#acknowledged) return;
    this.#input = this.#input.subarray(input_taken - this.#acknowledged);
    this.#acknowledged = input_taken;
    if (this.#waiting) this.#changed.wake();
  }

  /** The client has the output up to here. */
  taken(offset: number): void {
    this.#taken = offset;
    if (offset - this.#reported >= pieceBytes) this.#changed.wake();
  }

  /** The requests of one call, until its signal fires. */
  async *requests(open: AttachTerminalOpen, signal: AbortSignal): AsyncGenerator<AttachTerminalRequest> {
    this.#begun = false;
    yield { open };
    while (!signal.aborted) {
      // Before the agent has said so, nobody knows from where on input is to be sent.
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
    const waiting = this.#waiting;
    if (waiting && 'input' in waiting) this.#append(waiting.input);
    const at = this.#next - this.#acknowledged;
    if (at < this.#input.length) {
      const input = this.#input.subarray(at, at + pieceBytes);
      this.#next += input.length;
      if (!this.#counted) this.acknowledge(this.#next);
      return { input };
    }
    if (!waiting || 'input' in waiting) return undefined;
    this.#took(undefined);
    return waiting;
  }

  /** As much of what the client types as there is room for. */
  #append(input: Uint8Array): void {
    const room = mostBytes - this.#input.length;
    this.#input = Buffer.concat([this.#input, input.subarray(0, room)]);
    this.#took(input.length > room ? { input: input.subarray(room) } : undefined);
  }

  #took(rest: Doing | undefined): void {
    this.#waiting = rest;
    if (!rest) this.#changed.wake();
  }
}

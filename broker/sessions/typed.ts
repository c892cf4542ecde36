// What a client has typed and its machine may not have: sent again after a lost link, from where the agent has it.
import { AppError } from '../../shared/errors.ts';

/** What may be on its way: while it is so much, nothing more is sent. */
const mostBytes = 64 * 1024;
/** What is sent again goes in pieces of this size. */
const pieceBytes = 32 * 1024;

/** Counted in bytes of input, as the agent counts them over all calls of this client. */
export class Typed {
  /** Sent and not confirmed, oldest first. One piece: many small ones would cost far more than they hold. */
  #kept: Buffer = Buffer.alloc(0);
  /** Offset of the first byte of it. */
  #confirmed = 0;
  /** Next byte that this call is to send. */
  #next = 0;
  /** The agent says what it has; an older one does not, and then nothing is kept. */
  #counted = false;

  /** A call begins. Says how much may be lost: what was on its way to an agent that has forgotten this client. */
  begin(taken: number | undefined, known: boolean): number {
    if (this.#counted && known && taken !== undefined && taken >= this.#confirmed) {
      this.#next = this.#end;
      this.confirm(taken);
      this.#next = taken;
      return 0;
    }
    const lost = this.#kept.length;
    this.#counted = taken !== undefined;
    this.#kept = Buffer.alloc(0);
    this.#confirmed = taken ?? 0;
    this.#next = this.#confirmed;
    return lost;
  }

  /** The agent has so much. Throws machine_error when it cannot. */
  confirm(taken: number): void {
    if (!this.#counted) return;
    if (taken > this.#next) {
      const told = { sent: this.#next, told: taken };
      throw new AppError('machine_error', 'the machine has more input than it was sent', told);
    }
    if (taken <= this.#confirmed) return;
    this.#kept = this.#kept.subarray(taken - this.#confirmed);
    this.#confirmed = taken;
  }

  /** The next piece that has to be sent again. */
  again(): Buffer | undefined {
    if (this.#next === this.#end) return undefined;
    const at = this.#next - this.#confirmed;
    const piece = this.#kept.subarray(at, at + pieceBytes);
    this.#next += piece.length;
    return piece;
  }

  /** Whether so much more may be sent now. */
  fits(bytes: number): boolean {
    return this.#kept.length + bytes <= mostBytes;
  }

  /** Something new is sent. */
  sending(input: Uint8Array): void {
    if (!this.#counted) return;
    this.#kept = Buffer.concat([this.#kept, input]);
    this.#next = this.#end;
  }

  get #end(): number {
    return this.#confirmed + this.#kept.length;
  }
}

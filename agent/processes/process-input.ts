// Sends input to a running process: bytes in order, each accepted once, with a limit on unread bytes.
import { Socket } from 'node:net';
import { AppError } from '../../shared/errors.ts';

/** Most bytes that may wait for the process to read them. */
const waitingBytes = 1024 * 1024;

export class Input {
  readonly #pipe: Socket;
  #taken = 0;
  #waiting = 0;
  #ended = false;

  /**
   * `fd`: the write end of the pipe, owned and closed by this object. `first`: bytes sent before all others.
   */
  constructor(fd: number, first: Uint8Array = Buffer.alloc(0)) {
    this.#pipe = new Socket({ fd, readable: false, writable: true });
    // A process may exit or close its input at any time; write() refuses all later bytes.
    this.#pipe.on('error', () => {});
    if (first.length > 0) this.#pipe.write(first);
  }

  /**
   * Accepts `data`, which begins at byte `offset` of the whole input; by default it follows the accepted
   * bytes. Bytes that were accepted before are skipped, so a caller may send them again. Returns the number
   * of bytes accepted in all.
   */
  write(data: Uint8Array, offset = this.#taken, end = false): number {
    if (offset > this.#taken) {
      throw new AppError('conflict', `only ${this.#taken} bytes of input came before`, {
        taken: this.#taken,
      });
    }
    const fresh = data.subarray(this.#taken - offset);
    if (fresh.length > 0) this.#queue(fresh);
    if (end && !this.#ended) this.#pipe.end();
    this.#ended ||= end;
    return this.#taken;
  }

  /** Closes the pipe. Later input is refused. */
  close(): void {
    this.#pipe.destroy();
  }

  #queue(data: Uint8Array): void {
    if (this.#ended) throw new AppError('conflict', 'the input of this command was ended before');
    if (this.#pipe.destroyed) throw new AppError('conflict', 'the command has closed its input');
    if (this.#waiting + data.length > waitingBytes) {
      throw new AppError('unavailable', 'the command does not read its input', { waiting: this.#waiting });
    }
    this.#taken += data.length;
    this.#waiting += data.length;
    // Copied, because the bytes are a slice of a larger message that would stay in memory.
    this.#pipe.write(Buffer.from(data), () => {
      this.#waiting -= data.length;
    });
  }
}

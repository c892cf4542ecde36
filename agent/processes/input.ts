// The input of a running process: bytes in the order they came, each taken once, and a queue with an end.
import { Socket } from 'node:net';
import { AppError } from '../../shared/errors.ts';

/** What may wait for a process to read it. */
const waitingBytes = 1024 * 1024;

export class Input {
  readonly #pipe: Socket;
  #taken = 0;
  #waiting = 0;
  #ended = false;

  /** `fd`: the end of the pipe that writes, its own from now on. `first` goes before everything else. */
  constructor(fd: number, first: Uint8Array = Buffer.alloc(0)) {
    this.#pipe = new Socket({ fd, readable: false, writable: true });
    // A process may exit or close its input whenever it likes; later bytes are refused.
    this.#pipe.on('error', () => {});
    if (first.length > 0) this.#pipe.write(first);
  }

  /**
   * Takes what is new of bytes that stand at `offset` of all that was given, at the end by default.
   * Returns how many were taken in all.
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

  /** The process no longer reads; later input is refused. */
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
    // A copy, for the bytes are part of a larger message.
    this.#pipe.write(Buffer.from(data), () => {
      this.#waiting -= data.length;
    });
  }
}

// Stores a terminal's last output by byte offset, in memory: the echo of a key press must not wait for a disk.

import { terminalReplayBytes } from '../../../shared/command-and-terminal-limits.ts';
import { AppError } from '../../../shared/errors.ts';
import { Backpressure } from '../../../shared/output-backpressure.ts';
import type { Wake } from '../../../shared/wait-for-change.ts';

interface Block {
  start: number;
  bytes: Buffer;
  size: number;
}

export class Scrollback {
  /** Pauses the program while all clients are far behind. The pause has no time limit. */
  readonly pace: Backpressure;
  readonly #windowBytes: number;
  readonly #blockBytes: number;
  readonly #changed: Wake;
  readonly #blocks: Block[] = [];
  #end = 0;

  /** Stores at least the last `windowBytes` bytes, and at most a sixteenth more. Each append calls `changed.wake()`. */
  constructor(windowBytes: number, changed: Wake) {
    this.#windowBytes = windowBytes;
    this.#blockBytes = Math.ceil(windowBytes / 16);
    this.#changed = changed;
    this.pace = new Backpressure(windowBytes / 8, Number.POSITIVE_INFINITY);
  }

  /** Offset of the first stored byte. */
  get start(): number {
    return this.#blocks[0]?.start ?? this.#end;
  }

  /** Offset after the last byte. */
  get end(): number {
    return this.#end;
  }

  /**
   * Returns the offset from which a new client gets output: `terminalReplayBytes` before the end, or the first stored
   * byte. If this is inside a UTF-8 character, returns the offset of the next character.
   */
  replayFrom(): number {
    const from = Math.max(this.start, this.#end - terminalReplayBytes);
    if (from === 0) return 0;
    const whole = this.read(from, 4).findIndex((byte) => (byte & 0xc0) !== 0x80);
    return from + Math.max(whole, 0);
  }

  /** Stores output. Resolves when the next append may be made. */
  append(data: Uint8Array): Promise<void> {
    for (let at = 0; at < data.length; ) at += this.#put(data.subarray(at));
    this.#changed.wake();
    return this.pace.hold(() => this.#end);
  }

  /** Stops the pauses that slow clients cause: from now on append() resolves immediately. */
  release(): void {
    this.pace.release();
  }

  /**
   * Returns at most `max` bytes from offset `from`; empty at the end of the output. The returned bytes never
   * change.
   */
  read(from: number, max: number): Buffer {
    const block = this.#blocks.find(({ start, size }) => from >= start && from < start + size);
    if (!block) return Buffer.alloc(0);
    const at = from - block.start;
    return block.bytes.subarray(at, Math.min(at + max, block.size));
  }

  #put(data: Uint8Array): number {
    let last = this.#blocks.at(-1);
    if (!last || last.size === this.#blockBytes) {
      last = { start: this.#end, bytes: Buffer.allocUnsafeSlow(this.#blockBytes), size: 0 };
      this.#blocks.push(last);
    }
    const taken = Math.min(data.length, this.#blockBytes - last.size);
    last.bytes.set(data.subarray(0, taken), last.size);
    last.size += taken;
    this.#end += taken;
    while (this.#end - (this.#blocks[1]?.start ?? this.#end) >= this.#windowBytes) this.#blocks.shift();
    return taken;
  }
}

/** The error for an offset whose output was dropped, or has not been written yet. */
export function fellOut({ start, end }: Scrollback, offset: number): AppError {
  const message = `the terminal's output at offset ${offset} is not stored; attach again with an offset from ${start} to ${end}`;
  return new AppError('range_not_satisfiable', message, { from: start, to: end });
}

// A pseudo terminal. The agent reads and writes the master. The program has the slave as stdin, stdout and stderr.
import { closeSync, constants, openSync, writeSync } from 'node:fs';
import { createRequire } from 'node:module';
import { ReadStream } from 'node:tty';
import { sleep } from '../../../shared/clock.ts';
import { AppError, errnoOf } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import { drain, Pump, type Sink } from '../copy-output-to-log.ts';
import type { Plan } from '../launch-plan.ts';
import type { Stdio } from '../running-process.ts';

export interface Size {
  cols: number;
  rows: number;
}

/** The native addon of node-pty. It only opens and resizes terminals; the spawner starts the programs. */
export interface PtyMaker {
  open(cols: number, rows: number): { master: number; slave: number; pty: string };
  resize(master: number, cols: number, rows: number): void;
}

/** Loads node-pty's addon, an optional dependency; undefined if this kind of machine has none. */
export function loadPtyMaker(): PtyMaker | undefined {
  try {
    // An addon has no types. PtyMaker declares the two functions that the agent calls.
    return createRequire(import.meta.url)(`@lydell/node-pty-linux-${process.arch}/pty.node`) as PtyMaker;
  } catch {
    return undefined;
  }
}

/**
 * Shell script that opens the terminal ($0) and then executes the program ($@). The terminal becomes the controlling
 * terminal of the shell's session.
 */
const openTerminal = 'exec "$@" 0<>"$0" 1>&0 2>&0';
/** Longest wait in milliseconds between two attempts to write to a program that does not read. */
const longestWaitMs = 100;

export interface PtyOptions {
  id: string;
  plan: Plan;
  size: Size;
  output: Sink & { release(): void };
  log: Logger;
}

export class Pty implements Stdio {
  readonly request: Stdio['request'];
  readonly links: string[];
  readonly #maker: PtyMaker;
  readonly #master: number;
  readonly #output: PtyOptions['output'];
  readonly #pump: Pump;
  #stream: ReadStream | undefined;
  /**
   * The agent's own descriptor of the slave. Without it, the terminal would end as soon as no program has the slave
   * open.
   */
  #slave: number | undefined;
  #written: Promise<void> = Promise.resolve();

  constructor(maker: PtyMaker, { id, plan, size, output, log }: PtyOptions) {
    const { master, slave, pty } = openPair(maker, size);
    this.#slave = slave;
    this.#maker = maker;
    this.#master = master;
    this.#output = output;
    const open = (onread: object): ReadStream => {
      // ReadStream passes all options on to net.Socket, as Node's documentation says.
      this.#stream = new ReadStream(master, { onread } as object);
      return this.#stream;
    };
    this.#pump = new Pump(open, output, id, log);
    this.links = [pty];
    const args = ['-c', openTerminal, pty, plan.file, ...plan.args];
    const nowhere = { stdin: undefined, stdout: '/dev/null', stderr: '/dev/null' };
    this.request = { file: '/bin/sh', args, ...nowhere };
  }

  /** Writes bytes in the order of the calls. Resolves when the terminal has accepted all bytes, or is over. */
  write(data: Uint8Array): Promise<void> {
    this.#written = this.#written.then(() => this.#write(data));
    return this.#written;
  }

  resize({ cols, rows }: Size): void {
    if (!this.#over) this.#maker.resize(this.#master, cols, rows);
  }

  async handedOver(): Promise<void> {
    // The agent's slave stays open (see #slave). It is closed by drain(), after the program has ended.
  }

  async drain(ms: number): Promise<void> {
    this.#output.release();
    if (this.#slave !== undefined) closeSync(this.#slave);
    this.#slave = undefined;
    await drain([this.#pump], ms);
  }

  close(): void {
    this.#pump.cut();
  }

  /** True once the stream is closed. The master's file descriptor may then belong to another file. */
  get #over(): boolean {
    return this.#stream?.destroyed ?? true;
  }

  /**
   * Uses writeSync(), which fails with EAGAIN while the terminal is full. The stream's own write() would instead block
   * the whole agent until the program reads.
   */
  async #write(data: Uint8Array): Promise<void> {
    let wait = 1;
    for (let at = 0; at < data.length && !this.#over; ) {
      try {
        at += writeSync(this.#master, data, at);
        wait = 1;
      } catch (error) {
        if (errnoOf(error) !== 'EAGAIN') return;
        await sleep(wait);
        wait = Math.min(2 * wait, longestWaitMs);
      }
    }
  }
}

function openPair(maker: PtyMaker, { cols, rows }: Size): ReturnType<PtyMaker['open']> {
  const { master, slave: given, pty } = maker.open(cols, rows);
  try {
    // Node opens the slave again, with close-on-exec. The addon's own descriptor of the slave is closed, because other
    // programs that the agent starts would inherit it.
    return { master, slave: openSync(pty, constants.O_RDWR | constants.O_NOCTTY), pty };
  } catch (error) {
    closeSync(master);
    throw error;
  } finally {
    closeSync(given);
  }
}

export function checkedSize(size: Size | null | undefined): Size {
  const { cols = 0, rows = 0 } = size ?? {};
  const fine = [cols, rows].every((one) => Number.isInteger(one) && one >= 1 && one <= 1000);
  if (!fine)
    throw new AppError(
      'invalid_request',
      `a terminal needs 1 to 1000 columns and rows, not ${cols} and ${rows}`,
    );
  return { cols, rows };
}

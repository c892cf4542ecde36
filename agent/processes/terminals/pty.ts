// A pseudo terminal: its master, which we read and write, and what the program gets of it.
import { closeSync, constants, openSync, writeSync } from 'node:fs';
import { createRequire } from 'node:module';
import { ReadStream } from 'node:tty';
import { sleep } from '../../../shared/clock.ts';
import { AppError, errnoOf } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import type { Plan } from '../plan.ts';
import { drain, Pump, type Sink } from '../pump.ts';
import type { Stdio } from '../running-process.ts';

export interface Size {
  cols: number;
  rows: number;
}

/** The native part of node-pty; its own way of starting programs is not ours. */
export interface PtyMaker {
  open(cols: number, rows: number): { master: number; slave: number; pty: string };
  resize(master: number, cols: number, rows: number): void;
}

/** Undefined where there is none for this kind of machine: it is an optional dependency. */
export function loadPtyMaker(): PtyMaker | undefined {
  try {
    // An addon has no types; these are the two functions of it that we call.
    return createRequire(import.meta.url)(`@lydell/node-pty-linux-${process.arch}/pty.node`) as PtyMaker;
  } catch {
    return undefined;
  }
}

/** Becomes the program, with the terminal as its three files: who opens one as a leader of a session gets it for its own. */
const openTerminal = 'exec "$@" 0<>"$0" 1>&0 2>&0';
/** How long a program that reads nothing is left alone between two tries. */
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
  readonly #stream: () => ReadStream | undefined;
  /** While we have it open too, the terminal does not end before the program has opened it, and not between two. */
  #slave: number | undefined;
  #written: Promise<void> = Promise.resolve();

  constructor(maker: PtyMaker, { id, plan, size, output, log }: PtyOptions) {
    const { master, slave, pty } = openPair(maker, size);
    this.#slave = slave;
    this.#maker = maker;
    this.#master = master;
    this.#output = output;
    let stream: ReadStream | undefined;
    const open = (onread: object): ReadStream => {
      // The stream passes all options on to net.Socket, as its documentation says, but the types do not know them.
      stream = new ReadStream(master, { onread } as object);
      return stream;
    };
    this.#pump = new Pump(open).into(output, id, log);
    this.#stream = () => stream;
    this.links = [pty];
    const args = ['-c', openTerminal, pty, plan.file, ...plan.args];
    const nowhere = { stdin: undefined, stdout: '/dev/null', stderr: '/dev/null' };
    this.request = { file: '/bin/sh', args, ...nowhere };
  }

  /** Resolves when the terminal has taken it all, or is over. Bytes go in the order of the calls. */
  write(data: Uint8Array): Promise<void> {
    this.#written = this.#written.then(() => this.#write(data));
    return this.#written;
  }

  resize({ cols, rows }: Size): void {
    if (!this.#over) this.#maker.resize(this.#master, cols, rows);
  }

  async handedOver(): Promise<void> {
    // The slave stays open to the end.
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

  /** The number of the master may be that of another file then. */
  get #over(): boolean {
    return this.#stream()?.destroyed ?? true;
  }

  /** Not through the stream: it waits for a program that reads nothing, and everybody else with it. */
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

/** Both ends and the name of the slave; nothing stays open when that fails. */
function openPair(maker: PtyMaker, { cols, rows }: Size): ReturnType<PtyMaker['open']> {
  const { master, slave: given, pty } = maker.open(cols, rows);
  try {
    // What Node opens is close-on-exec, and the slave that came is not.
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
  if (!fine) throw new AppError('invalid_request', 'a terminal has 1 to 1000 columns and rows');
  return { cols, rows };
}

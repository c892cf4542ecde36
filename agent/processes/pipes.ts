// Creates stdin, stdout and stderr of a command: named pipes, or a file for input that is complete from the
// start. Node's own stdio pipes are sockets: on a socket `echo >/dev/stderr` fails, and bash takes a socket
// as its input for a remote login.
import { spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { chmodSync, closeSync, constants, openSync, readSync, rmSync } from 'node:fs';
import { type FileHandle, mkdir, open, rm, unlink } from 'node:fs/promises';
import { Socket } from 'node:net';
import { join } from 'node:path';
import { AppError, errnoOf } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { OutputLog } from '../../shared/output-log.ts';
import { drain, Pump } from './copy-output.ts';
import type { Plan } from './launch-plan.ts';
import { Input } from './process-input.ts';
import type { Stdio } from './running-process.ts';

/** Pipes made by one run of mkfifo(1). A pipe costs up to a millisecond on a disk, so pipes are reused. */
const batch = 32;

/** A pool of named pipes that no process has open. */
export class PipeNames {
  readonly #directory: string;
  /** Differs for each start of the agent, so that a spawner of an earlier agent cannot open these pipes. */
  readonly #prefix = randomUUID();
  readonly #free: string[] = [];
  #made = 0;
  #refill: Promise<void> | undefined;

  /** Removes the directory and creates it anew with the first pipes. */
  static async open(directory: string): Promise<PipeNames> {
    await rm(directory, { recursive: true, force: true });
    await mkdir(directory, { mode: 0o700 });
    const names = new PipeNames(directory);
    await names.#more();
    return names;
  }

  private constructor(directory: string) {
    this.#directory = directory;
  }

  async take(): Promise<string> {
    for (;;) {
      const path = this.#free.shift();
      if (path === undefined) await this.#refillOnce();
      else if (isFree(path)) return path;
      else rmSync(path, { force: true });
    }
  }

  #refillOnce(): Promise<void> {
    this.#refill ??= this.#more().finally(() => {
      this.#refill = undefined;
    });
    return this.#refill;
  }

  /** Returns the pipes of an ended command to the pool. */
  giveBack(paths: readonly string[]): void {
    this.#free.push(...paths);
  }

  async close(): Promise<void> {
    await this.#refill?.catch(() => {});
    await rm(this.#directory, { recursive: true, force: true });
  }

  async #more(): Promise<void> {
    const name = (): string => join(this.#directory, `${this.#prefix}-${this.#made++}`);
    const paths = Array.from({ length: batch }, name);
    await mkfifo(paths);
    this.#free.push(...paths);
  }
}

/**
 * Whether no process has the pipe open. A process left by an earlier command could otherwise read the output
 * of the next command, or write into it.
 */
function isFree(path: string): boolean {
  try {
    const reader = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
    try {
      // read(2) fails with EAGAIN while a process has the pipe open for writing (pipe(7)).
      if (readSync(reader, Buffer.alloc(1)) > 0) return false;
    } finally {
      closeSync(reader);
    }
    closeSync(openSync(path, constants.O_WRONLY | constants.O_NONBLOCK));
    return false;
  } catch (error) {
    // open(2) fails with ENXIO when no process has the pipe open for reading (fifo(7)).
    return errnoOf(error) === 'ENXIO';
  }
}

function mkfifo(paths: string[]): Promise<void> {
  return new Promise((resolve, reject) => {
    const fail = (cause?: unknown): void => {
      reject(new AppError('unavailable', 'mkfifo failed in the data directory', {}, { cause }));
    };
    const env = { PATH: '/usr/bin:/bin', NODE_V8_COVERAGE: undefined };
    const child = spawn('mkfifo', ['-m', '600', '--', ...paths], { stdio: 'ignore', env });
    child.once('error', fail);
    child.once('exit', (code) => (code === 0 ? resolve() : fail()));
  });
}

export interface PipedOptions {
  id: string;
  plan: Plan;
  names: PipeNames;
  /** A file with the whole input; undefined if there is none or it stays open. */
  whole: FileHandle | undefined;
  /** The first bytes of an input that stays open. */
  first: Uint8Array | undefined;
  stdout: OutputLog;
  stderr: OutputLog;
  log: Logger;
}

/** Stdin, stdout and stderr of a command. The outputs are copied into the output logs. */
export class Piped implements Stdio {
  readonly request: Stdio['request'];
  readonly links: string[];
  /** The input, if it stays open. */
  readonly input: Input | undefined;
  readonly #names: PipeNames;
  /** The command runs as another user, who could open the pipes again through /proc. They are not reused. */
  readonly #foreign: boolean;
  readonly #outputs: OutputLog[];
  readonly #pumps: Pump[] = [];
  readonly #whole: FileHandle | undefined;
  /** The command's ends of the pipes. The agent sees no end of file while it has these open. */
  readonly #theirs: number[] = [];

  static async open(options: PipedOptions): Promise<Piped> {
    const { names, first } = options;
    const [out, err] = [await names.take(), await names.take()];
    return new Piped(options, out, err, first && (await names.take()));
  }

  private constructor(options: PipedOptions, out: string, err: string, input: string | undefined) {
    const { id, plan, whole, first, stdout, stderr, log } = options;
    this.#outputs = [stdout, stderr];
    this.#names = options.names;
    this.#foreign = plan.foreign;
    this.#whole = whole;
    this.links = input === undefined ? [out, err] : [out, err, input];
    // The file has no name, so the spawner opens it through /proc of the agent.
    const stdin = whole ? `/proc/${process.pid}/fd/${whole.fd}` : input;
    this.request = { file: plan.file, args: plan.args, stdin, stdout: out, stderr: err };
    try {
      for (const path of [out, err]) {
        // Another user must be able to open /dev/stderr, which opens the pipe by its name.
        if (plan.foreign) chmodSync(path, 0o622);
        const pipe = pumpOf(path).into(path === out ? stdout : stderr, id, log);
        this.#pumps.push(pipe);
        this.#theirs.push(openSync(path, constants.O_WRONLY));
      }
      if (input !== undefined) this.input = new Input(this.#openInput(input, plan.foreign), first);
    } catch (error) {
      this.#closeTheirs();
      this.close();
      throw error;
    }
  }

  async handedOver(): Promise<void> {
    this.#closeTheirs();
    await this.#whole?.close();
  }

  async drain(ms: number): Promise<void> {
    // Readers need not be waited for: little is left in the pipes.
    for (const output of this.#outputs) output.release();
    await drain(this.#pumps, ms);
  }

  close(): void {
    const clean = this.#pumps.length === 2 && this.#pumps.every(({ ended }) => ended) && !this.#foreign;
    for (const pump of this.#pumps) pump.cut();
    this.input?.close();
    const [out = '', err = '', ...input] = this.links;
    if (clean) this.#names.giveBack([out, err]);
    for (const path of clean ? input : this.links) rmSync(path, { force: true });
  }

  #closeTheirs(): void {
    for (const fd of this.#theirs.splice(0)) closeSync(fd);
  }

  /** Opens the write end of the input pipe, which is possible only while a read end is open. */
  #openInput(path: string, shared: boolean): number {
    if (shared) chmodSync(path, 0o644);
    const reader = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
    try {
      const writer = openSync(path, constants.O_WRONLY | constants.O_NONBLOCK);
      this.#theirs.push(openSync(path, constants.O_RDONLY));
      return writer;
    } finally {
      closeSync(reader);
    }
  }
}

function pumpOf(path: string): Pump {
  const fd = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
  try {
    return new Pump((onread) => new Socket({ fd, readable: true, writable: false, onread }));
  } catch (error) {
    closeSync(fd);
    throw error;
  }
}

/**
 * Stores complete input in a file without a name, which ends by itself.
 * A program may open its /dev/stdin late or twice; with a named pipe that would wait for a writer that is
 * gone. The file is in memory (/dev/shm) where that exists, because users pass secrets as input.
 */
export async function openInput(bytes: Uint8Array, directory: string): Promise<FileHandle> {
  const name = `farhand-${randomUUID()}`;
  try {
    return await nameless(join('/dev/shm', name), bytes);
  } catch {
    return nameless(join(directory, name), bytes);
  }
}

async function nameless(path: string, bytes: Uint8Array): Promise<FileHandle> {
  const writer = await open(path, 'wx', 0o400);
  try {
    const reader = await open(path, 'r');
    await unlink(path);
    await writer.writeFile(bytes);
    // Only a process that has the file open can reach it now. The command may run as another user.
    await writer.chmod(0o444);
    return reader;
  } finally {
    await writer.close();
  }
}

// Creates stdin, stdout and stderr of a command, as named pipes or files. Node would create sockets instead. With
// sockets, `echo >/dev/stderr` fails, and bash behaves as if it was started by a remote login.
import { execFile } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { chmodSync, closeSync, constants, openSync, readSync, rmSync } from 'node:fs';
import { type FileHandle, mkdir, open, rm, unlink } from 'node:fs/promises';
import { type OnReadOpts, Socket } from 'node:net';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { AppError, errnoOf } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { drain, Pump, type Sink } from './copy-output-to-log.ts';
import type { Plan } from './launch-plan.ts';
import type { Stdio } from './running-process.ts';

/**
 * Number of pipes made by one run of mkfifo(1). Later commands use the pipes again, because creating one takes up to a
 * millisecond.
 */
const batch = 32;

/** Maximum number of bytes of input that may wait for the process to read them. */
const waitingBytes = 1024 * 1024;

/** A pipe that no other process has open. `reader`: the file descriptor of its read end. */
interface FreePipe {
  path: string;
  reader: number;
}

/** A pool of named pipes that no process has open. */
export class PipeNames {
  readonly #directory: string;
  /**
   * Prefix of the names of pipes. It differs at each start of the agent, so that a spawner left by an earlier run
   * cannot open these pipes.
   */
  readonly #prefix = randomUUID();
  readonly #free: string[] = [];
  #made = 0;
  #refill: Promise<void> | undefined;

  /** Removes the directory that an earlier run of the agent has left, and creates it again. */
  static async open(directory: string): Promise<PipeNames> {
    await rm(directory, { recursive: true, force: true });
    await mkdir(directory, { mode: 0o700 });
    return new PipeNames(directory);
  }

  private constructor(directory: string) {
    this.#directory = directory;
  }

  async take(): Promise<FreePipe> {
    for (;;) {
      const path = this.#free.shift();
      const reader = path && openFreePipe(path);
      if (path && reader) return { path, reader };
      if (path) rmSync(path, { force: true });
      else {
        this.#refill ??= this.#more();
        await this.#refill;
      }
    }
  }

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
    await mkfifo(paths).finally(() => {
      this.#refill = undefined;
    });
    this.#free.push(...paths);
  }
}

/**
 * Opens a pipe for reading. Returns undefined if a process left by an earlier command still has the pipe open, because
 * that process could read the next command's output.
 */
function openFreePipe(path: string): number | undefined {
  try {
    closeSync(openSync(path, constants.O_WRONLY | constants.O_NONBLOCK));
    return undefined;
  } catch (error) {
    // open(2) fails with ENXIO when no process has the pipe open for reading (fifo(7)).
    if (errnoOf(error) !== 'ENXIO') return undefined;
  }
  const reader = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
  try {
    // read(2) returns 0 only if no process has the pipe open for writing (pipe(7)), so the next command may use it.
    if (readSync(reader, Buffer.alloc(1)) === 0) return reader;
  } catch {
    // EAGAIN: another process has the empty pipe open for writing, so the pipe is not free.
  }
  closeSync(reader);
  return undefined;
}

async function mkfifo(paths: string[]): Promise<void> {
  const env = { PATH: '/usr/bin:/bin', NODE_V8_COVERAGE: undefined };
  await promisify(execFile)('mkfifo', ['-m', '600', '--', ...paths], { env }).catch((cause: unknown) => {
    const message =
      'mkfifo could not create a named pipe for a command; check the free disk space of the machine';
    throw new AppError('unavailable', message, {}, { cause });
  });
}

interface PipedOptions {
  command: { id: string; stdout: Output; stderr: Output };
  plan: Plan;
  /**
   * If `input` is false, `stdin` is the whole input. If `input` is true, `stdin` is only the beginning of the input,
   * and more may follow.
   */
  spec: { stdin: Uint8Array; input: boolean };
  names: PipeNames;
  /** The directory for the file with the whole input, on a machine without /dev/shm. */
  outputs: string;
  log: Logger;
}

/** An output log. Its append() waits for slow readers. After release() has been called, it no longer waits. */
type Output = Sink & { release(): void };

/** Stdin, stdout and stderr of a command. Copies the outputs into the output logs. */
export class Piped implements Stdio {
  /** Paths of the pipes: stdout, stderr and, if it is a pipe, stdin. */
  readonly links: string[] = [];
  /** Sends input to the command. Set only if the command's input stays open. */
  input: Input | undefined;
  readonly #options: PipedOptions;
  readonly #pumps: Pump[] = [];
  /** The command's ends of the pipes. The agent sees the end of the output only after handedOver() has closed them. */
  readonly #theirs: number[] = [];
  /** A file with the whole input, if the request contains the whole input. */
  #whole: FileHandle | undefined;

  static async open(options: PipedOptions): Promise<Piped> {
    const piped = new Piped(options);
    try {
      await piped.#open();
      return piped;
    } catch (error) {
      await piped.handedOver();
      piped.close();
      throw error;
    }
  }

  private constructor(options: PipedOptions) {
    this.#options = options;
  }

  get request(): Stdio['request'] {
    const { file, args } = this.#options.plan;
    const [stdout = '', stderr = '', input] = this.links;
    // The file has no name. The spawner opens it through the agent's directory in /proc.
    const stdin = this.#whole ? `/proc/${process.pid}/fd/${this.#whole.fd}` : input;
    return { file, args, stdin, stdout, stderr };
  }

  async handedOver(): Promise<void> {
    for (const fd of this.#theirs.splice(0)) closeSync(fd);
    await this.#whole?.close();
  }

  async drain(ms: number): Promise<void> {
    // From now on, the copying does not wait for slow readers: the process has ended, so little output is left in the
    // pipes.
    const { stdout, stderr } = this.#options.command;
    for (const output of [stdout, stderr]) output.release();
    await drain(this.#pumps, ms);
  }

  close(): void {
    const { plan, names } = this.#options;
    // Later commands reuse the output pipes if both have ended. After a command that ran as another user they are
    // removed, because processes of that user could still open them through /proc.
    const clean = this.#pumps.length === 2 && this.#pumps.every(({ ended }) => ended) && !plan.foreign;
    for (const pump of this.#pumps) pump.cut();
    this.input?.close();
    if (clean) names.giveBack(this.links.splice(0, 2));
    for (const path of this.links) rmSync(path, { force: true });
  }

  async #open(): Promise<void> {
    const { command, spec, outputs, log } = this.#options;
    for (const output of [command.stdout, command.stderr]) {
      const { path, reader: fd } = await this.#take(0o622);
      const open = (onread: OnReadOpts): Socket =>
        new Socket({ fd, readable: true, writable: false, onread });
      this.#pumps.push(new Pump(open, output, command.id, log));
      this.#theirs.push(openSync(path, constants.O_WRONLY));
    }
    if (spec.input) {
      const { path, reader } = await this.#take(0o644);
      this.#theirs.push(reader);
      this.input = new Input(openSync(path, constants.O_WRONLY | constants.O_NONBLOCK), spec.stdin);
    } else if (spec.stdin.length > 0) {
      this.#whole = await openInputFile(spec.stdin, outputs);
    }
  }

  /**
   * Takes a pipe from the pool. If the command runs as another user, sets the file mode `mode`, so that the command can
   * open the pipe by name, for example as /dev/stderr.
   */
  async #take(mode: number): Promise<FreePipe> {
    const pipe = await this.#options.names.take();
    this.links.push(pipe.path);
    if (this.#options.plan.foreign) chmodSync(pipe.path, mode);
    return pipe;
  }
}

/**
 * Stores complete input in a file without a name. If stdin were a named pipe, a program that opens /dev/stdin late or
 * twice would wait forever.
 */
async function openInputFile(bytes: Uint8Array, directory: string): Promise<FileHandle> {
  const name = `farhand-${randomUUID()}`;
  try {
    // The file is in memory if possible, because users pass secrets as input.
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
    // The file has no name any more, but another user's command must be able to open it through /proc.
    await writer.chmod(0o444);
    return reader;
  } finally {
    await writer.close();
  }
}

/**
 * Sends input to a running process. Accepts bytes in order, each of them once. At most `waitingBytes` accepted bytes
 * wait until the process reads them.
 */
export class Input {
  readonly #pipe: Socket;
  #taken = 0;
  #waiting = 0;
  #ended = false;

  /** `fd`: the write end of the pipe, which this object closes. `first`: bytes sent before all others. */
  constructor(fd: number, first: Uint8Array = Buffer.alloc(0)) {
    this.#pipe = new Socket({ fd, readable: false, writable: true });
    // No handling is needed: a process may exit or close its input at any time. write() then refuses all later bytes.
    this.#pipe.on('error', () => {});
    if (first.length > 0) this.#pipe.write(first);
  }

  /**
   * Accepts the new bytes of `data`, which begins at byte `offset` of the whole input. Returns the number of bytes
   * accepted in all.
   */
  write(data: Uint8Array, offset = this.#taken, end = false): number {
    if (offset > this.#taken) {
      throw new AppError('conflict', `the input must continue at byte ${this.#taken}, not ${offset}`, {
        taken: this.#taken,
      });
    }
    // Bytes that were accepted before are skipped, so that a caller may send them again.
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
    if (this.#ended) throw new AppError('conflict', 'the input of the command was ended by an earlier call');
    if (this.#pipe.destroyed) throw new AppError('conflict', 'the command has closed its input');
    if (this.#waiting + data.length > waitingBytes) {
      throw new AppError(
        'unavailable',
        'the command does not read its input; send less, or try again later',
        { waiting: this.#waiting },
      );
    }
    this.#taken += data.length;
    this.#waiting += data.length;
    // The bytes are a slice of a larger message. Without the copy, the whole message would stay in memory.
    this.#pipe.write(Buffer.from(data), () => {
      this.#waiting -= data.length;
    });
  }
}

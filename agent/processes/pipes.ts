// What a child gets as its first three files. Node's own stdio pipes are sockets: `echo >/dev/stderr` fails
// on them, and bash takes a socket as its input for a remote login. So these are real pipes and a file.
import { spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { chmodSync, closeSync, constants, openSync, readSync, rmSync } from 'node:fs';
import { type FileHandle, mkdir, open, rm, unlink } from 'node:fs/promises';
import { join } from 'node:path';
import { AppError, errnoOf } from '../../shared/errors.ts';

/** Names made by one call of mkfifo. */
const batch = 32;

/** The pipes of one command, which nobody else has. */
export interface Pipes {
  /** Of standard output and error; /proc/PID/fd of whoever has them open shows the same. */
  paths: string[];
  /** Of standard input, where one was asked for. */
  inputPath: string | undefined;
  /** `shared`: the command runs as another user, who may want to open /dev/stderr too. */
  open(shared: boolean): OpenPipes;
  /** They may serve another command: `free` when nobody writes there any more. */
  giveBack(free: boolean): void;
}

/** Descriptors: ours, and the same ends as the child's, to close once it has them. */
export interface OpenPipes {
  ours: [stdout: number, stderr: number];
  theirs: [stdout: number, stderr: number];
  /** Where one was asked for. */
  input: { ours: number; theirs: number } | undefined;
}

export interface PipeSupply {
  /** With `input` a third one, for input. */
  take(input: boolean): Promise<Pipes>;
  close(): Promise<void>;
}

/** Keeps some named pipes: making one takes a process, which a command should not wait for. */
export async function openPipeSupply(directory: string): Promise<PipeSupply> {
  const ready: string[] = [];
  let made = 0;
  let refill: Promise<void> | undefined;
  await rm(directory, { recursive: true, force: true });
  await mkdir(directory, { mode: 0o700 });

  async function more(): Promise<void> {
    const paths = Array.from({ length: batch }, () => join(directory, String(made++)));
    await mkfifo(paths);
    ready.push(...paths);
  }
  function refillOnce(): Promise<void> {
    refill ??= more().finally(() => {
      refill = undefined;
    });
    return refill;
  }
  await refillOnce();

  /** One that nobody holds. */
  async function next(): Promise<string> {
    for (;;) {
      const path = ready.shift();
      if (path === undefined) await refillOnce();
      else if (isFree(path)) return path;
      else rmSync(path, { force: true });
    }
  }

  /** Two for output, and perhaps one for input. */
  async function some(input: boolean): Promise<[outputs: string[], inputs: string[]]> {
    const taken: string[] = [];
    try {
      while (taken.length < (input ? 3 : 2)) taken.push(await next());
    } catch (error) {
      ready.push(...taken);
      throw error;
    }
    return [taken.slice(0, 2), taken.slice(2)];
  }

  return {
    async take(input) {
      const [paths, inputs] = await some(input);
      return {
        paths,
        inputPath: inputs[0],
        open: (shared) => openPipes(paths, inputs[0], shared),
        giveBack(free) {
          if (free) ready.push(...paths);
          else for (const path of paths) rmSync(path, { force: true });
          // Who holds only this one shows nowhere, and would take the input of the next command.
          for (const path of inputs) rmSync(path, { force: true });
        },
      };
    },
    async close() {
      await refill?.catch(() => {});
      await rm(directory, { recursive: true, force: true });
    },
  };
}

/** Something that a command has left could take what the next one writes, or write there itself. */
function isFree(path: string): boolean {
  const reader = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
  try {
    // With nobody at the other end it is at its end (pipe(7)).
    if (readSync(reader, Buffer.alloc(1)) > 0) return false;
  } catch (error) {
    if (errnoOf(error) === 'EAGAIN') return false;
    throw error;
  } finally {
    closeSync(reader);
  }
  return !hasReader(path);
}

function hasReader(path: string): boolean {
  try {
    closeSync(openSync(path, constants.O_WRONLY | constants.O_NONBLOCK));
    return true;
  } catch (error) {
    // Nobody has it open for reading (fifo(7)).
    if (errnoOf(error) === 'ENXIO') return false;
    throw error;
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

function openPipes([out = '', err = '']: string[], input: string | undefined, shared: boolean): OpenPipes {
  const opened: number[] = [];
  const open = (path: string, flags: number): number => {
    const fd = openSync(path, flags);
    opened.push(fd);
    return fd;
  };
  // Ours do not wait for the other end; the child's do not either, for ours are there.
  const ours = (path: string, flags: number): number => open(path, flags | constants.O_NONBLOCK);
  try {
    if (shared) for (const path of [out, err]) chmodSync(path, 0o622);
    if (shared && input) chmodSync(input, 0o644);
    return {
      ours: [ours(out, constants.O_RDONLY), ours(err, constants.O_RDONLY)],
      theirs: [open(out, constants.O_WRONLY), open(err, constants.O_WRONLY)],
      input: input === undefined ? undefined : openInputPipe(input, ours, open),
    };
  } catch (error) {
    for (const fd of opened) closeSync(fd);
    throw error;
  }
}

type Open = (path: string, flags: number) => number;

/** The end that writes can be opened only while one reads. */
function openInputPipe(path: string, ours: Open, theirs: Open): { ours: number; theirs: number } {
  const reader = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
  try {
    return { ours: ours(path, constants.O_WRONLY), theirs: theirs(path, constants.O_RDONLY) };
  } finally {
    closeSync(reader);
  }
}

/**
 * Input that is known from the start as a file without a name: its end comes by itself, and /dev/stdin can be
 * opened, also late and twice; on a named pipe that waits for a writer, who has gone.
 * In memory where that exists, for people pass secrets this way.
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
    // Only who holds it can reach it now, and that may be another user.
    await writer.chmod(0o444);
    return reader;
  } finally {
    await writer.close();
  }
}

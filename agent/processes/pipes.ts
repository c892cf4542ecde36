// What a child gets as its first three files. Node's own stdio pipes are sockets: `echo >/dev/stderr` fails
// on them, and bash takes a socket as its input for a remote login. So these are real pipes and a file.
import { spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { chmodSync, closeSync, constants, openSync, readSync, rmSync } from 'node:fs';
import { type FileHandle, mkdir, open, rm, unlink } from 'node:fs/promises';
import { Socket } from 'node:net';
import { join } from 'node:path';
import { AppError, errnoOf } from '../../shared/errors.ts';
import { Pump } from './pump.ts';

/** Names made by one call of mkfifo. */
const batch = 32;

/** The pipes of one command, which nobody else has. */
export interface Pipes {
  /** Of standard output and error; /proc/PID/fd of whoever has them open shows the same. */
  paths: string[];
  /** Of standard input, where one was asked for. */
  inputPath: string | undefined;
  /** Nobody has read or written there yet. */
  pumps: [stdout: Pump, stderr: Pump];
  /** Our end of the input, to be closed by who takes them. */
  input: number | undefined;
  /** The command has its own ends, or never will: until then there is no end of its output. */
  handedOver(): void;
  /** They may serve another command: `free` when nobody writes there any more. */
  giveBack(free: boolean): void;
}

export interface PipeSupply {
  /** With `input` a third one, for input. `shared`: another user's command may want to open /dev/stderr too. */
  take(input: boolean, shared: boolean): Promise<Pipes>;
  close(): Promise<void>;
}

/** Two pipes, open at both ends. */
interface Outputs {
  paths: string[];
  pumps: [Pump, Pump];
  theirs: number[];
}

/** Keeps some named pipes: making one takes a process, which a command should not wait for. */
export async function openPipeSupply(directory: string): Promise<PipeSupply> {
  const ready: string[] = [];
  let made = 0;
  let refill: Promise<void> | undefined;
  /** Those of the next command, which need not wait for them either. */
  let ahead: Outputs | undefined;
  let closed = false;
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
  openAhead();

  /** One that nobody holds, of those there are. */
  function next(): string | undefined {
    for (;;) {
      const path = ready.shift();
      if (path === undefined || isFree(path)) return path;
      remove(path);
    }
  }

  async function some(count: number): Promise<string[]> {
    const taken: string[] = [];
    try {
      while (taken.length < count) {
        const path = next();
        if (path === undefined) await refillOnce();
        else taken.push(path);
      }
    } catch (error) {
      ready.push(...taken);
      throw error;
    }
    return taken;
  }

  /** While a command runs, the agent has nothing to do for it. Where it fails, the next one tries again and is told. */
  function openAhead(): void {
    if (ahead || closed) return;
    const paths: string[] = [];
    try {
      for (let path = next(); path !== undefined; path = next()) {
        paths.push(path);
        if (paths.length < 2) continue;
        ahead = openOutputs(paths);
        return;
      }
    } catch {
      // Too many files are open, or the disk fails.
    }
    ready.push(...paths);
  }

  async function outputs(): Promise<Outputs> {
    const found = ahead;
    ahead = undefined;
    if (found) return found;
    const paths = await some(2);
    try {
      return openOutputs(paths);
    } catch (error) {
      ready.push(...paths);
      throw error;
    }
  }

  function giveBack(paths: string[], free: boolean): void {
    if (free) ready.push(...paths);
    else for (const path of paths) remove(path);
  }

  return {
    async take(input, shared) {
      const [inputPath] = input ? await some(1) : [];
      let taken: Outputs | undefined;
      try {
        taken = await outputs();
        const { paths, pumps, theirs } = taken;
        if (shared) for (const path of paths) chmodSync(path, 0o622);
        const inputs = inputPath === undefined ? undefined : openInputPipe(inputPath, shared);
        if (inputs) theirs.push(inputs.theirs);
        return {
          paths,
          inputPath,
          pumps,
          input: inputs?.ours,
          handedOver() {
            for (const fd of theirs.splice(0)) closeSync(fd);
            openAhead();
          },
          giveBack(free) {
            giveBack(paths, free);
            // Who holds only this one shows nowhere, and would take the input of the next command.
            if (inputPath) remove(inputPath);
          },
        };
      } catch (error) {
        if (inputPath) remove(inputPath);
        if (taken) {
          drop(taken);
          giveBack(taken.paths, false);
        }
        throw error;
      }
    },
    async close() {
      closed = true;
      if (ahead) drop(ahead);
      ahead = undefined;
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

/** Ours do not wait for the other end; the child's do not either, for ours are there. */
function openOutputs(paths: string[]): Outputs {
  const pumps: Pump[] = [];
  const theirs: number[] = [];
  try {
    for (const path of paths) pumps.push(pumpOf(path));
    for (const path of paths) theirs.push(openSync(path, constants.O_WRONLY));
    const [out, err] = pumps;
    if (!out || !err) throw new Error('a command has two outputs');
    return { paths, pumps: [out, err], theirs };
  } catch (error) {
    drop({ pumps, theirs });
    throw error;
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

function drop({ pumps, theirs }: { pumps: Pump[]; theirs: number[] }): void {
  for (const pump of pumps) pump.cut();
  for (const fd of theirs) closeSync(fd);
}

/** A name that stays all the same is not used again. */
function remove(path: string): void {
  try {
    rmSync(path, { force: true });
  } catch {
    // The disk cannot be written.
  }
}

/** The end that writes can be opened only while one reads. */
function openInputPipe(path: string, shared: boolean): { ours: number; theirs: number } {
  if (shared) chmodSync(path, 0o644);
  const reader = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
  let ours: number | undefined;
  try {
    ours = openSync(path, constants.O_WRONLY | constants.O_NONBLOCK);
    return { ours, theirs: openSync(path, constants.O_RDONLY) };
  } catch (error) {
    if (ours !== undefined) closeSync(ours);
    throw error;
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

// Runs a program of the machine to its end and returns its output. Time and output are limited.
import { spawn } from 'node:child_process';
import { constants } from 'node:os';
import { after } from '../../shared/clock.ts';
import { errnoOf } from '../../shared/errors.ts';

interface ProgramOptions {
  signal: AbortSignal;
  /** Exit codes besides 0 that mean success. */
  codes?: readonly number[];
  /** If this matches the program's stderr, the exit codes in `codes` mean failure. */
  isFailure?: RegExp;
  env?: Readonly<Record<string, string>>;
}

/** Milliseconds that a program may run. */
const programMs = 30_000;
const mostOutput = 8 * 1024 * 1024;
/** The PATH in which programs are found. It includes the sbin directories, which often only root has in its PATH. */
const path = '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin';

/** The reason why a part of the inventory could not be read. */
export class PartFailed extends Error {}

/**
 * Returns the text that a program prints to stdout. Throws PartFailed if the program cannot start, fails, prints
 * too much or takes too long.
 */
export function runProgram(
  program: string,
  args: readonly string[],
  { signal, codes = [], isFailure, env = {} }: ProgramOptions,
): Promise<string> {
  const child = spawn(program, args, {
    cwd: '/',
    // The program leads a process group, so that killGroup() also kills the program's children.
    detached: true,
    env: { PATH: path, LC_ALL: 'C', HOME: '/nonexistent', ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  const { promise, resolve, reject } = Promise.withResolvers<string>();
  const fail = (reason: string): void => reject(new PartFailed(`${program} ${reason}`));
  child.on('error', (error) => fail(errnoOf(error) === 'ENOENT' ? 'is not installed' : 'could not start'));
  // Without free file descriptors, Node creates no pipes, and reports the error later.
  if (!child.stdout) return promise;
  const chunks: Buffer[] = [];
  let size = 0;
  let complaint = '';
  child.stdout.on('data', (chunk: Buffer) => {
    size += chunk.length;
    if (size > mostOutput) return fail(`printed more than ${mostOutput} bytes`);
    chunks.push(chunk);
  });
  child.stderr.setEncoding('utf8').on('data', (text: string) => {
    complaint = (complaint + text).slice(0, 500);
  });
  child.on('close', (code, name) => {
    const [failure] = isFailure?.exec(complaint) ?? [];
    if (code === 0 || (code !== null && codes.includes(code) && !failure))
      return resolve(Buffer.concat(chunks).toString());
    const reason = failure ?? complaint.trim().split('\n')[0];
    fail(`ended with ${code ?? name}${reason ? `: ${reason}` : ''}`);
  });
  const stop = (): void => fail('was stopped');
  signal.addEventListener('abort', stop, { once: true });
  // The time limit also ends the wait for a background process that keeps stdout open.
  const cancelTimeout = after(programMs, () => fail(`did not end within ${programMs / 1000} s`));
  return promise.finally(() => {
    cancelTimeout();
    signal.removeEventListener('abort', stop);
    // A program that has ended is not killed, because the kernel may have given its pid to another process.
    if (child.exitCode === null && child.signalCode === null) killGroup(child.pid);
    child.stdout.destroy();
    child.stderr.destroy();
  });
}

function killGroup(pid: number | undefined): void {
  try {
    if (pid !== undefined) process.kill(-pid, constants.signals.SIGKILL);
  } catch {
    // ESRCH: all processes of the group have ended, so there is nothing to kill.
  }
}

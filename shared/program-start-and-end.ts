// Functions that agent, broker and command line use when they start or fail. They check the Node version, set the
// process name, and format the message of a failure.
import { execFileSync } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { errnoOf, StartError, UsageError } from './errors.ts';
import { reasonOf } from './system-error-messages.ts';

/** True if a Node version has the HTTP/2 fixes that the link needs. package.json has the same range. */
export function nodeIsGood(version: string): boolean {
  const [major = 0, minor = 0, patch = 0] = version.replace(/^v/, '').split('.').map(Number);
  const atLeast = (wantedMinor: number, wantedPatch: number): boolean =>
    minor > wantedMinor || (minor === wantedMinor && patch >= wantedPatch);
  if (major === 22) return atLeast(23, 2);
  return major > 24 || (major === 24 && atLeast(18, 1));
}

/**
 * Ignores EPIPE on standard output. A reader that stops early, such as `head`, would otherwise end the program with an
 * error.
 */
export function letReadersGo(): void {
  process.stdout.on('error', (error) => {
    if (errnoOf(error) !== 'EPIPE') throw error;
  });
}

/** Masks the value of a flag in this process's command line, which every user of the machine can read. */
export function hideArgument(flag: string): void {
  const words = [process.argv0, ...process.execArgv, ...process.argv.slice(1)];
  const visible = words.map((word, n) =>
    words[n - 1] === flag ? '***' : word.startsWith(`${flag}=`) ? `${flag}=***` : word,
  );
  // Assigning to process.title overwrites the whole command line (Node's documentation, libuv's uv_set_process_title).
  if (visible.some((word, n) => word !== words[n])) process.title = visible.join(' ');
}

/**
 * Sets the process name in `ps` and `systemctl status`. Does not use process.title, which would overwrite the
 * arguments.
 */
export function nameProcess(name: string): void {
  try {
    writeFileSync('/proc/self/comm', name);
  } catch {
    // The program works without this name.
  }
}

/** Returns message and exit code of a failure: 2 for usage, 78 for configuration, 1 for other errors. */
export function failure(program: string, error: unknown): { text: string; code: number } {
  const message = error instanceof Error ? error.message : String(error);
  if (error instanceof UsageError) return { text: `${program}: ${message}\nSee ${program} --help.`, code: 2 };
  if (error instanceof StartError) return { text: `${program}: ${message}`, code: error.exitCode };
  // Errors of the operating system are printed without a stack.
  const text = reasonOf(error);
  const more = error instanceof Error && text === message ? (error.stack ?? message) : text;
  return { text: `${program}: ${more}`, code: 1 };
}

export const wrongNode = `Node ${process.version} is not supported; install Node 22.23.2 or a later 22.x, or Node 24.18.1 or later`;

/**
 * Returns the start of the error message of a program whose data directory is in use by another process. The CLI looks
 * for this text in the log of a broker that did not start: it means that another broker is running.
 */
export const inUse = (program: string, directory: string): string =>
  `another ${program} already uses ${directory}`;

/** Returns the name of the user with this id; undefined if the system has no such user. */
export function userName(uid: number): string | undefined {
  try {
    return execFileSync('id', ['-nu', '--', String(uid)], { encoding: 'utf8', stdio: 'pipe' }).trim();
  } catch {
    return undefined;
  }
}

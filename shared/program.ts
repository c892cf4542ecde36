// What the three programs share at their start: the check of the Node version, and how failures are printed.
import { writeFileSync } from 'node:fs';
import { errnoOf, StartError, UsageError } from './errors.ts';
import { reasonOf } from './system-errors.ts';

/** Whether a Node version has the HTTP/2 fixes that the link needs: `>=22.23.2 <23 || >=24.18.1`, as in package.json. */
export function nodeIsGood(version: string): boolean {
  const [major = 0, minor = 0, patch = 0] = version.replace(/^v/, '').split('.').map(Number);
  const atLeast = (wantedMinor: number, wantedPatch: number): boolean =>
    minor > wantedMinor || (minor === wantedMinor && patch >= wantedPatch);
  if (major === 22) return atLeast(23, 2);
  return major > 24 || (major === 24 && atLeast(18, 1));
}

/** A reader that stops early, as `head` does, is no failure: what is under way goes on. */
export function letReadersGo(): void {
  process.stdout.on('error', (error) => {
    if (errnoOf(error) !== 'EPIPE') throw error;
  });
}

/**
 * Takes the value of a flag out of the command line, which every user of the machine can read. What is assigned to
 * process.title overwrites all of it, to its end (Node's documentation, libuv's uv_set_process_title).
 */
export function hideArgument(flag: string): void {
  const words = [process.argv0, ...process.execArgv, ...process.argv.slice(1)];
  const visible = words.map((word, n) =>
    words[n - 1] === flag ? '***' : word.startsWith(`${flag}=`) ? `${flag}=***` : word,
  );
  if (visible.some((word, n) => word !== words[n])) process.title = visible.join(' ');
}

/** The name that `ps` and `systemctl status` show for this process; not by process.title, which would take the arguments away. */
export function nameProcess(name: string): void {
  try {
    writeFileSync('/proc/self/comm', name);
  } catch {
    // It runs as well under another one.
  }
}

/** The line to print and the code to exit with: 2 for usage, 78 for configuration, 1 for the rest. */
export function failure(program: string, error: unknown): { text: string; code: number } {
  const message = error instanceof Error ? error.message : String(error);
  if (error instanceof UsageError) return { text: `${program}: ${message}\nSee ${program} --help.`, code: 2 };
  if (error instanceof StartError) return { text: `${program}: ${message}`, code: error.exitCode };
  // What the system refuses needs no stack.
  const text = reasonOf(error);
  const more = error instanceof Error && text === message ? (error.stack ?? message) : text;
  return { text: `${program}: ${more}`, code: 1 };
}

export const wrongNode = `this needs Node 22.23.2 or newer of 22, or 24.18.1 or newer; this is ${process.version}`;

/** How the refusal of a directory begins that another process has; the CLI waits for the end of that. */
export const inUse = (program: string, directory: string): string =>
  `another ${program} already uses ${directory}`;

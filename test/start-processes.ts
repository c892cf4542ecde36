// Starts brokers and agents as separate processes, for tests that kill them with kill -9.
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { onTestFinished } from 'vitest';
import { shippedProgram } from './bundled-programs.ts';

const root = join(import.meta.dirname, '..');

/**
 * Returns the file to start. For a broker it is the bundle, because loading its 500 source files takes twice as long.
 */
const fileOf = (main: string): string =>
  main === 'broker/main.ts' ? shippedProgram('farhand-broker') : join(root, main);

/** Starts a real program as a separate process. Ends it with the test. `under` is a command that runs the program. */
export function program(
  main: string,
  args: string[],
  under: string[] = [],
): ChildProcess & { line(text: string): Promise<Record<string, unknown>> } {
  const [command = '', ...words] = [...under, process.execPath, fileOf(main), ...args];
  const child = spawn(command, words, { stdio: ['ignore', 'ignore', 'pipe'] });
  onTestFinished(() => void child.kill('SIGKILL'));
  const lines = createInterface({ input: child.stderr });
  const seen: Record<string, unknown>[] = [];
  lines.on('line', (line) => {
    if (line.startsWith('{')) seen.push(JSON.parse(line));
    child.emit('logged');
  });
  return Object.assign(child, {
    /** Resolves with the next line of the program's log that has this message. */
    async line(text: string): Promise<Record<string, unknown>> {
      for (;;) {
        const at = seen.findIndex(({ msg }) => msg === text);
        const [found] = at < 0 ? [] : seen.splice(0, at + 1).slice(-1);
        if (found) return found;
        if (child.exitCode !== null)
          throw new Error(`${main} ended with ${child.exitCode} before it said: ${text}`);
        await once(child, 'logged');
      }
    },
  });
}

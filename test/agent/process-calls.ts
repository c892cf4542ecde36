// Helpers for tests of processes without a link: specs of commands, other agents, and whether a process runs.
import { readFile, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import type { Limits } from '../../agent/processes/running-process.ts';
import type { ProcessSpec__Output } from '../../proto/types/farhand/agent/v1/ProcessSpec.ts';

const root = join(import.meta.dirname, '../..');

/** A spec of a shell command without input, with these fields. */
export const specOf = (more: Partial<ProcessSpec__Output>): ProcessSpec__Output => ({
  ...{ command: '', direct: false, args: [], cwd: '', env: {}, user: '' },
  ...{ stdin: Buffer.alloc(0), timeout_ms: 0, input: false },
  ...more,
});

/** True if a process exists and is not a zombie. */
export async function alive(pid: number): Promise<boolean> {
  const text = await readFile(`/proc/${pid}/stat`, 'latin1').catch(() => '');
  return text !== '' && !/^[ZX]/.test(text.slice(text.lastIndexOf(')') + 2));
}

/**
 * Writes a program that acts as another agent on the directory `agent` in `home`. `body` may use `processes`, `call`,
 * and `spec`, a spec with an empty command. Returns the path of the program.
 */
export async function writeAgentProgram(
  home: string,
  body: string,
  more: Partial<Limits> = {},
): Promise<string> {
  const path = join(home, 'fixture.ts');
  const from = (name: string): string => JSON.stringify(join(root, name));
  await writeFile(
    path,
    `import { startProcesses } from ${from('agent/processes/index.ts')};
    import { createLogger } from ${from('shared/logger.ts')};
    import { specOf } from ${from('test/agent/process-calls.ts')};
    const directory = ${JSON.stringify(join(home, 'agent'))};
    const limits = ${JSON.stringify({ graceMs: 100, killForMs: 2000, ...more })};
    const processes = await startProcesses({ directory, log: createLogger('test', 'error'), mayRunAs: true, limits });
    const spec = specOf({ cwd: ${JSON.stringify(home)} });
    const call = { signal: new AbortController().signal };
    ${body}`,
  );
  return path;
}

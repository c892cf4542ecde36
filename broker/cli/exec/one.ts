// A command on one machine: its output is ours, our input is its, and its exit code too.
import type { Farhand } from '../../../shared/sdk/index.ts';
import { machineNamed } from '../named.ts';
import { cleanJson, print, sayJson } from '../output.ts';
import {
  cancelOnSignals,
  type ExecOptions,
  exitCodeOf,
  explain,
  follow,
  type Hearer,
  paintHint,
  type Spec,
  tellGap,
  tellOutput,
} from './follow.ts';
import { hasInput, passInput } from './input.ts';

export async function runOnOne(
  client: Farhand,
  machine: string,
  spec: Spec,
  { detach, interactive, output }: ExecOptions,
): Promise<number> {
  const input = !detach && (interactive || hasInput());
  const machine_id = await machineNamed(client, machine);
  const command = await client.commands.async({ machine_id, ...spec, ...(input && { input }) });
  const command_id = command.id;
  if (detach) {
    print(output, command, () => [command_id]);
    return 0;
  }
  const over = new AbortController();
  const stop = cancelOnSignals(() => client.commands.cancel({ command_id }));
  try {
    const passed = input ? passInput(client, command_id, over.signal) : undefined;
    const end = await follow(client, command_id, output === 'json' ? asLines(command_id) : plain);
    over.abort();
    await passed;
    if (output === 'json') sayJson({ command_id, ...end });
    const why = explain(end);
    if (why && stop.code() === undefined) paintHint(why);
    return end.status === 'cancelled' ? (stop.code() ?? exitCodeOf(end)) : exitCodeOf(end);
  } finally {
    over.abort();
    stop.forget();
  }
}

const plain: Hearer = { output: tellOutput, gap: tellGap };

/** For programs: an object a line. */
export function asLines(command_id: string, more: Record<string, unknown> = {}): Hearer {
  const line = (rest: Record<string, unknown>): string => `${cleanJson({ command_id, ...more, ...rest })}\n`;
  return {
    output(stream, bytes) {
      const text = Buffer.from(bytes).toString('utf8');
      const whole = Buffer.from(text).equals(bytes);
      const shown = whole ? text : Buffer.from(bytes).toString('base64');
      return tellOutput('stdout', line({ stream, data: shown, encoding: whole ? 'utf-8' : 'base64' }));
    },
    gap: (stream, dropped) => void tellOutput('stdout', line({ stream, dropped })),
  };
}

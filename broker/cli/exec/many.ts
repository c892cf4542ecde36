// A command on many machines: each line under the name of its machine, and a summary at the end.
import { UsageError } from '../../../shared/errors.ts';
import type { Farhand } from '../../../shared/sdk/index.ts';
import { given } from '../flags.ts';
import { readInput } from '../input.ts';
import { machineNamed, namesOf } from '../named.ts';
import { clean, cleanLines, hint, print, sayJson } from '../output.ts';
import {
  cancelOnSignals,
  type End,
  type ExecOptions,
  exitCodeOf,
  explain,
  follow,
  type Hearer,
  type OutputStream,
  type Spec,
  tellOutput,
} from './follow.ts';
import { asLines } from './one.ts';

/** Each is a connection; the others are followed in their turn. */
const followedAtOnce = 32;
/** A line that has no end so far. */
const longestLine = 64 * 1024;

/** Of the 64 KiB that args, env and input of a batch may have together. */
const mostInput = 48 * 1024;
const whatElse =
  'several machines take text of 48 KiB at most; put a file there first, and let the command read it';

interface Member {
  command_id: string;
  name: string;
  end?: End;
}

export async function runOnMany(
  client: Farhand,
  machines: string[],
  spec: Spec,
  options: ExecOptions,
): Promise<number> {
  const { tag: tags, concurrency, maxFailures: max_failures, interactive, detach, output } = options;
  const stdin = interactive ? await readInput(mostInput, whatElse) : undefined;
  const machine_ids = tags ? undefined : await Promise.all(machines.map((one) => machineNamed(client, one)));
  const wish = given({ machine_ids, tags, concurrency, max_failures, stdin });
  const batch = await client.batches.create({ ...spec, ...wish, wait: 0 });
  if (batch.results.length === 0) throw new UsageError('no machine is meant');
  if (detach) {
    print(output, batch, () => [batch.id]);
    return 0;
  }
  const nameOf = await namesOf(
    client,
    batch.results.map(({ machine_id }) => machine_id),
  );
  const members: Member[] = batch.results.map(({ id, machine_id }) => ({
    command_id: id,
    name: nameOf(machine_id),
  }));
  const stop = cancelOnSignals(() => client.batches.cancel({ batch_id: batch.id }));
  try {
    await followAll(client, members, output === 'json');
    summarize(members, output === 'json');
    return stop.code() ?? (members.every(({ end }) => end?.status === 'completed') ? 0 : 1);
  } finally {
    stop.forget();
  }
}

async function followAll(client: Farhand, members: Member[], json: boolean): Promise<void> {
  const width = Math.max(...members.map(({ name }) => name.length));
  const waiting = [...members];
  const one = async (): Promise<void> => {
    for (let member = waiting.shift(); member; member = waiting.shift()) {
      const { command_id, name } = member;
      const lines = json ? undefined : underName(clean(name).padEnd(width));
      member.end = await follow(client, command_id, lines ?? asLines(command_id, { machine: name }));
      await lines?.flush();
      if (json) sayJson({ command_id, machine: name, ...member.end });
    }
  };
  await Promise.all(Array.from({ length: followedAtOnce }, one));
}

/** Whole lines, for those of several machines come between each other; sanitized, so that none can forge another's. */
function underName(name: string): Hearer & { flush(): Promise<void> } {
  const rest: Record<OutputStream, string> = { stdout: '', stderr: '' };
  const decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };
  const put = (stream: OutputStream, lines: string[]): Promise<void> =>
    lines.length > 0
      ? tellOutput(stream, lines.map((line) => `${name} | ${cleanLines(line)}\n`).join(''))
      : Promise.resolve();
  return {
    async output(stream, bytes) {
      const lines = (rest[stream] + decoders[stream].decode(bytes, { stream: true })).split('\n');
      rest[stream] = lines.pop() ?? '';
      if (rest[stream].length > longestLine) {
        lines.push(rest[stream]);
        rest[stream] = '';
      }
      await put(stream, lines);
    },
    gap: (stream, count) => void put('stderr', [`[${count} bytes of ${stream} were dropped]`]),
    async flush() {
      for (const stream of ['stdout', 'stderr'] as const) if (rest[stream]) await put(stream, [rest[stream]]);
    },
  };
}

function summarize(members: Member[], json: boolean): void {
  const counts = new Map<string, number>();
  for (const { end } of members)
    counts.set(end?.status ?? 'lost', (counts.get(end?.status ?? 'lost') ?? 0) + 1);
  if (json) return;
  hint(
    `${members.length} machines: ${[...counts].map(([status, count]) => `${count} ${status}`).join(', ')}`,
  );
  for (const { name, end } of members) {
    if (!end || end.status === 'completed') continue;
    hint(`  ${clean(name)}: ${explain(end) ?? `exit code ${exitCodeOf(end)}`}`);
  }
}

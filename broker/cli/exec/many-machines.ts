// Runs a command on many machines. Prints each line of output with the name of its machine in front, and a summary at
// the end.
import type { Farhand } from '../../../shared/sdk/index.ts';
import { given } from '../declare-verb.ts';
import { findMachine, machineNames } from '../find-by-name.ts';
import { clean, cleanLines, counted, hint, print, printJson } from '../print.ts';
import { readInput } from '../prompt.ts';
import * as one from './follow-command.ts';
import { type ConnectionReporter, reportConnection } from './report-silence.ts';

/** Maximum number of commands whose output is read at the same time. Each of them uses a connection. */
const followedAtOnce = 32;
/** A line that is longer than this number of characters is printed in parts. */
const maxLine = 64 * 1024;
/**
 * Maximum number of bytes of input. The broker limits the input, arguments and environment of a batch to 64 KiB
 * together, so this limit leaves room for the arguments and the environment.
 */
const maxInput = 48 * 1024;
const advice =
  'input for several machines must be UTF-8 of at most 48 KiB; send longer input as a file, and let the command read that file';

interface Member {
  command_id: string;
  name: string;
  end?: one.End;
}

export async function runOnMany(
  client: Farhand,
  machines: string[],
  params: one.Params,
  options: one.ExecOptions,
): Promise<number> {
  const { tags, concurrency, maxFailures: max_failures, interactive, detach, output } = options;
  const stdin = interactive ? await readInput(maxInput, advice) : undefined;
  const machine_ids = tags ? undefined : await Promise.all(machines.map((text) => findMachine(client, text)));
  const more = given({ machine_ids, tags, concurrency, max_failures, stdin });
  const batch = await client.batches.create({ ...params, ...more, wait: 0 });
  const { results } = batch;
  if (detach) {
    await print(output, batch, () => [batch.id]);
    return 0;
  }
  const ids = results.map(({ machine_id }) => machine_id);
  const nameOf = await machineNames(client, ids);
  const members: Member[] = results.map(({ id, machine_id }) => ({
    command_id: id,
    name: nameOf(machine_id),
  }));
  const stop = one.cancelOnSignals(() => client.batches.cancel({ batch_id: batch.id }));
  try {
    const seeLater = `farhand batches get ${batch.id}`;
    const connection = reportConnection(`batch ${batch.id} goes on (${seeLater})`);
    const next = `do not send it again: ${seeLater} prints its results`;
    await followAll(client, members, connection, output === 'json').catch(
      one.wasSent(`batch ${batch.id}`, next),
    );
    if (output !== 'json') summarize(members);
    return stop.code() ?? (members.every(({ end }) => end?.status === 'completed') ? 0 : 1);
  } finally {
    stop.forget();
  }
}

async function followAll(
  client: Farhand,
  members: Member[],
  connection: ConnectionReporter,
  json: boolean,
): Promise<void> {
  const width = Math.max(...members.map(({ name }) => name.length));
  const waiting = [...members];
  const work = async (): Promise<void> => {
    for (let member = waiting.shift(); member; member = waiting.shift()) {
      const { command_id, name } = member;
      const lines = json ? undefined : prefixed(clean(name).padEnd(width));
      member.end = await one.follow(
        client,
        command_id,
        lines ?? one.jsonLines(command_id, { machine: name }),
        connection,
      );
      await lines?.flush();
      if (json) printJson({ command_id, machine: name, ...member.end });
    }
  };
  await Promise.all(Array.from({ length: followedAtOnce }, work));
}

/**
 * Prints whole lines without control characters, so that a machine cannot imitate the output of another
 * machine.
 */
function prefixed(name: string): one.Listener & { flush(): Promise<void> } {
  const rest: Record<one.OutputStream, string> = { stdout: '', stderr: '' };
  const decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };
  const put = async (stream: one.OutputStream, lines: string[]): Promise<void> => {
    const text = lines.map((line) => `${name} | ${cleanLines(line)}\n`).join('');
    if (text) await one.writeOutput(stream, text);
  };
  return {
    async output(stream, bytes) {
      const lines = (rest[stream] + decoders[stream].decode(bytes, { stream: true })).split('\n');
      rest[stream] = lines.pop() ?? '';
      if (rest[stream].length > maxLine) {
        lines.push(rest[stream]);
        rest[stream] = '';
      }
      await put(stream, lines);
    },
    gap: (stream, count) => put('stderr', [`[${count} bytes of ${stream} were dropped]`]),
    async flush() {
      for (const stream of ['stdout', 'stderr'] as const) if (rest[stream]) await put(stream, [rest[stream]]);
    },
  };
}

function summarize(members: Member[]): void {
  const byStatus = Map.groupBy(members, ({ end }) => end?.status ?? 'lost');
  const counts = [...byStatus].map(([status, { length }]) => `${length} ${status}`);
  hint(`${counted(members.length)}: ${counts.join(', ')}`);
  for (const { name, end } of members) {
    if (!end || end.status === 'completed') continue;
    hint(`  ${clean(name)}: ${one.explain(end) ?? `exit code ${one.exitCodeOf(end)}`}`);
  }
}

// Runs a command on many machines. Prints each line of output with the name of its machine in front, and a summary at
// the end.
import { definedFields } from '../../../shared/defined-fields.ts';
import type { Farhand } from '../../../shared/sdk/index.ts';
import { findMachine, machineNames } from '../find-by-name.ts';
import { clean, cleanLines, counted, hint, print, printJson } from '../print.ts';
import { readInput } from '../prompt.ts';
import type { OutputName } from '../stdout-stderr-and-exit.ts';
import * as one from './follow-command.ts';
import { type ConnectionReporter, reportConnection } from './report-silence.ts';
import { hasInput } from './send-stdin.ts';

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

type Batch = Awaited<ReturnType<Farhand['batches']['create']>>;

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
  const { tags, concurrency, maxFailures: max_failures, interactive, detach } = options;
  const stdin = interactive ? await readInput(maxInput, advice) : undefined;
  if (!interactive && !detach && hasInput())
    hint('farhand: standard input is not sent to several machines; add -i to send it');
  const machine_ids = tags ? undefined : await Promise.all(machines.map((text) => findMachine(client, text)));
  const more = definedFields({ machine_ids, tags, concurrency, max_failures, stdin });
  const asked = client.batches.create({ ...params, ...more, wait: 0 });
  return followBatch(client, asked, options);
}

/**
 * Prints the output of all machines until the batch ends. Cancels the batch on Ctrl-C. Returns the exit code: 0 if the
 * command succeeded on all machines. With --detach, prints only the id of the batch. `isSaved`: the batch runs
 * a saved command; the output of a single machine is then printed without its name.
 */
export async function followBatch(
  client: Farhand,
  asked: Promise<Batch>,
  { detach, output }: Pick<one.ExecOptions, 'detach' | 'output'>,
  isSaved = false,
): Promise<number> {
  if (detach) {
    const batch = await asked;
    await print(output, batch, () => [batch.id]);
    return 0;
  }
  const json = output === 'json';
  // A signal may arrive while the batch runs already, but before its id. The batch is then cancelled later.
  const stop = one.cancelOnSignals(async () => client.batches.cancel({ batch_id: (await asked).id }));
  try {
    const { id: batch_id, results } = await asked;
    const plain = isSaved && results.length === 1;
    const ids = results.map(({ machine_id }) => machine_id);
    const nameOf = await machineNames(client, ids);
    const members: Member[] = results.map(({ id, machine_id }) => ({
      command_id: id,
      name: nameOf(machine_id),
    }));
    const seeLater = `farhand batches get ${batch_id}`;
    const connection = reportConnection(`batch ${batch_id} goes on (${seeLater})`);
    const next = `do not send it again: ${seeLater} prints its results`;
    await followAll(client, members, connection, listenersFor(members, json, plain)).catch(
      one.wasSent(`batch ${batch_id}`, next),
    );
    if (!json) summarize(members, plain);
    return stop.code() ?? (members.every(({ end }) => end?.status === 'completed') ? 0 : 1);
  } finally {
    stop.forget();
  }
}

interface MemberListener extends one.Listener {
  /** Called when the command has ended. */
  ended?(end: one.End): Promise<void> | void;
}

/** Returns a function that creates the listener for one machine of a batch. */
function listenersFor(members: readonly Member[], json: boolean, plain: boolean) {
  const width = Math.max(...members.map(({ name }) => name.length));
  return ({ command_id, name: machine }: Member): MemberListener => {
    if (plain && !json) return one.plain;
    if (!json) return prefixed(clean(machine).padEnd(width));
    const ended = (end: one.End): void => printJson({ command_id, machine, ...end });
    return { ...one.jsonLines(command_id, { machine }), ended };
  };
}

async function followAll(
  client: Farhand,
  members: readonly Member[],
  connection: ConnectionReporter,
  listenerFor: (member: Member) => MemberListener,
): Promise<void> {
  const waiting = [...members];
  const work = async (): Promise<void> => {
    for (let member = waiting.shift(); member; member = waiting.shift()) {
      const listener = listenerFor(member);
      member.end = await one.follow(client, member.command_id, listener, connection);
      await listener.ended?.(member.end);
    }
  };
  await Promise.all(Array.from({ length: followedAtOnce }, work));
}

/**
 * Prints whole lines without control characters, so that a machine cannot imitate the output of another
 * machine.
 */
function prefixed(name: string): MemberListener {
  const rest: Record<OutputName, string> = { stdout: '', stderr: '' };
  const decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };
  const put = async (stream: OutputName, lines: string[]): Promise<void> => {
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
    async ended() {
      for (const stream of ['stdout', 'stderr'] as const) {
        // decode() without an argument returns a replacement character if the output ended within a character.
        const last = rest[stream] + decoders[stream].decode();
        if (last) await put(stream, [last]);
      }
    },
  };
}

function summarize(members: readonly Member[], plain: boolean): void {
  const byStatus = Map.groupBy(members, ({ end }) => end?.status ?? 'lost');
  const counts = [...byStatus].map(([status, { length }]) => `${length} ${status}`);
  if (!plain) hint(`${counted(members.length)}: ${counts.join(', ')}`);
  for (const { name, end } of members) {
    if (!end || end.status === 'completed') continue;
    hint(`  ${clean(name)}: ${one.explain(end) ?? `exit code ${one.exitCodeOf(end)}`}`);
  }
}

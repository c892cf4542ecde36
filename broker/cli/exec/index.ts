// The verb farhand exec: runs a command on one machine as if it ran locally, or on many machines.
import type { Command } from 'commander';
import { definedFields } from '../../../shared/defined-fields.ts';
import { UsageError } from '../../../shared/errors.ts';
import type { Farhand } from '../../../shared/sdk/index.ts';
import { where, withBroker } from '../connect-to-broker.ts';
import { localVerb } from '../declare-verb.ts';
import { findMachine } from '../find-by-name.ts';
import { hint, print, printJson } from '../print.ts';
import { assertInput } from '../prompt.ts';
import * as one from './follow-command.ts';
import { reportConnection, reportMachine } from './report-silence.ts';
import { hasInput, sendInput } from './send-stdin.ts';

const notes = `
One word after -- is a line for the shell; several words are a program and its arguments.
Output is printed as it comes. On one machine, standard input is sent from a pipe or file, with -i also from a terminal.
Ctrl-C cancels the command and its child processes; a second Ctrl-C exits immediately.
Exit codes: that of the command, 128 + n for signal n, 124 after --timeout, 130 after Ctrl-C, 1 if it did not run
or its outcome is unknown. With several machines the exit code is 0, 1 or 130; input (-i) is text of at most 48 KiB.`;

export function addExec(program: Command): void {
  const spec = {
    about: 'run a command on one or several machines',
    usage: '[options] (MACHINE... | --tags TAGS) -- COMMAND [ARGUMENTS...]',
    examples: [
      'farhand exec web-1 -- uptime',
      "farhand exec web-1 -- 'journalctl -n 50 | grep -c error'",
      'farhand exec web-1 -- printf "%s\\n" "two words"',
      'farhand exec web-1 -- tar xz -C /srv < site.tar.gz',
      'farhand exec --tags web --concurrency 5 --max-failures 2 -- systemctl restart nginx',
    ],
    flags: one.flags,
    notes,
  };
  localVerb(program, 'exec [machines...]', spec, async (texts, options) => {
    const { machines, params } = paramsOf(texts, options);
    const [only, another] = machines;
    await withBroker(where(options), async (client) => {
      process.exitCode =
        only !== undefined && another === undefined
          ? await runOnOne(client, only, params, options)
          : await (await import('./many-machines.ts')).runOnMany(client, machines, params, options);
    });
  });
}

function paramsOf(texts: string[], options: one.ExecOptions): { machines: string[]; params: one.Params } {
  const cut = process.argv.indexOf('--');
  const words = cut < 0 ? [] : process.argv.slice(cut + 1);
  const machines = texts.slice(0, texts.length - words.length);
  const [command, ...args] = words;
  if (command === undefined)
    throw new UsageError('put the command after "--", as in: farhand exec web-1 -- uptime');
  if ((machines.length === 0) === (options.tags === undefined))
    throw new UsageError('choose the machines either by name or by --tags');
  const { timeout, cwd, env, user, queueFor } = options;
  const rest = definedFields({ timeout, cwd, env, user, queue_for: queueFor });
  return { machines, params: { command, ...(args.length > 0 && { args }), ...rest } };
}

async function runOnOne(
  client: Farhand,
  machine: string,
  params: one.Params,
  options: one.ExecOptions,
): Promise<number> {
  const { detach, interactive, output } = options;
  const input = !detach && (interactive || hasInput());
  if (input) assertInput();
  const machine_id = await findMachine(client, machine);
  const asked = client.commands.async({ machine_id, ...params, ...(input && { input }) });
  if (detach) {
    const command = await asked;
    await print(output, command, () => [command.id]);
    return 0;
  }
  const over = new AbortController();
  const silence = reportMachine(client, machine_id, machine);
  // A signal may arrive while the command runs already, but before its id. The command is then cancelled later.
  const stop = one.cancelOnSignals(async () => client.commands.cancel({ command_id: (await asked).id }));
  try {
    const command_id = (await asked).id;
    const sent = input ? sendInput(client, command_id, over.signal) : undefined;
    const listener = { ...(output === 'json' ? one.jsonLines(command_id) : one.plain), heard: silence.heard };
    const readLater = `farhand commands output ${command_id} --follow`;
    const connection = reportConnection(`command ${command_id} goes on (${readLater})`);
    const end = await one
      .follow(client, command_id, listener, connection)
      .catch(one.wasSent(`command ${command_id}`, `do not send it again: ${readLater} prints its output`));
    over.abort();
    await sent;
    if (output === 'json') printJson({ command_id, ...end });
    const why = one.explain(end);
    if (why && stop.code() === undefined) hint(`farhand: ${why}`);
    return end.status === 'cancelled' ? (stop.code() ?? one.exitCodeOf(end)) : one.exitCodeOf(end);
  } finally {
    over.abort();
    silence.stop();
    stop.forget();
  }
}

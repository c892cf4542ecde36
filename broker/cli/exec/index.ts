// farhand exec: a command on one machine, as if it ran here; or on many of them.
import type { Command } from 'commander';
import { UsageError } from '../../../shared/errors.ts';
import type { Farhand } from '../../../shared/sdk/index.ts';
import { collect, count, given, milliseconds, variables } from '../flags.ts';
import { verb, withClient } from '../verb.ts';
import type { ExecOptions, Spec } from './follow.ts';

export function addExec(program: Command): void {
  verb(
    program,
    'exec [machines...]',
    'run a command: exec MACHINE -- COMMAND',
    'farhand exec web-1 -- uptime',
    "farhand exec web-1 -- 'journalctl -n 50 | grep -c error'    one word: a line of shell",
    'farhand exec web-1 -- printf "%s\\n" "two words"           several: a program and its arguments, no shell',
    'farhand exec web-1 -- tar xz -C /srv < site.tar.gz',
    'farhand exec --tag web --concurrency 5 --max-failures 2 -- systemctl restart nginx',
  )
    .usage('[options] (MACHINE... | --tag TAG) -- COMMAND [ARGUMENTS...]')
    .option('--tag <tag>', 'on every machine with this tag; several times: with all of them', collect)
    .option('-i, --interactive', 'pass the input on also where it is a terminal, or to several machines')
    .option('--timeout <time>', 'kill it with all it started after so long', milliseconds('--timeout'))
    .option('--cwd <dir>', 'the directory it runs in')
    .option('--env <name=value>', 'a variable; several times', variables)
    .option('--user <name>', 'whom it runs as, where the agent may')
    .option(
      '--queue-for <time>',
      'how long it may wait for a machine that is offline',
      milliseconds('--queue-for'),
    )
    .option('--detach', 'print its id and leave it running')
    .option('--concurrency <count>', 'machines at once', count('--concurrency'))
    .option('--max-failures <count>', 'start no more when so many failed and one', count('--max-failures', 0))
    .addHelpText(
      'after',
      `
Output comes as it is written, input goes along unless it is a terminal. Ctrl-C cancels the command with all that
it started; once more leaves at once. Ends with the exit code of the command, 128 + n for signal n, 124 after
--timeout, 130 after Ctrl-C, 1 where it could not run or nobody knows; on several machines 0 or 1, and with -i\ntheir input is text of 48 KiB at most.`,
    )
    .action((told: string[], options: ExecOptions, command: Command) => {
      const { machines, spec } = read(told, options, process.argv);
      return withClient((client, _: ExecOptions) => start(client, machines, spec, options))(options, command);
    });
}

function read(told: string[], options: ExecOptions, argv: string[]): { machines: string[]; spec: Spec } {
  const cut = argv.indexOf('--');
  const words = cut < 0 ? [] : argv.slice(cut + 1);
  const machines = told.slice(0, told.length - words.length);
  const [command, ...args] = words;
  if (command === undefined) throw new UsageError('say the command after --: farhand exec web-1 -- uptime');
  if ((machines.length === 0) === (options.tag === undefined))
    throw new UsageError('say either machines or --tag');
  const { timeout, cwd, env, user, queueFor } = options;
  const rest = given({ timeout, cwd, env, user, queue_for: queueFor });
  return { machines, spec: { command, ...(args.length > 0 && { args }), ...rest } };
}

async function start(client: Farhand, machines: string[], spec: Spec, options: ExecOptions): Promise<void> {
  const [only, another] = machines;
  process.exitCode =
    only !== undefined && another === undefined
      ? await (await import('./one.ts')).runOnOne(client, only, spec, options)
      : await (await import('./many.ts')).runOnMany(client, machines, spec, options);
}

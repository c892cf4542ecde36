// The verbs of farhand saved-commands: manage programs with typed parameters, and run them on machines.
import type { Command } from 'commander';
import { definedFields } from '../../shared/defined-fields.ts';
import { UsageError } from '../../shared/errors.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { verb } from './declare-verb.ts';
import { findMachine, findSavedCommand } from './find-by-name.ts';
import { type Given, type Item, routeVerb, viewText } from './verb-from-route.ts';

type Creation = Parameters<Farhand['savedCommands']['create']>[0];
type Parameter = NonNullable<NonNullable<Creation>['parameters']>[number];

const types = ['string', 'integer', 'boolean', 'path'] as const;

const flags = {
  '--parameter <list>':
    'parameter: NAME, NAME:TYPE (string, integer, boolean or path), or NAME:A|B to allow only A and B; ? after NAME makes it optional; =VALUE at the end is used if a caller gives no value',
  '--description <text>': 'what the command does',
  '--user <name>': 'user to run as, if the agent allows it',
  '--cwd <dir>': 'working directory on the machine',
  '--timeout <duration>': 'kill the command and its child processes after this time',
} as const;

export function addSavedCommands(program: Command): void {
  const saved = program
    .command('saved-commands')
    .description('manage and run commands with parameters; a saved command is given by name or id');
  routeVerb(saved, 'list', 'savedCommands', 'list', {
    defaults: { sort: 'name' },
    view: {
      fields: 'name id command parameters description',
      cells: {
        command: ({ argv }) => argv.join(' '),
        parameters: ({ parameters }) => parameters.map(({ name }) => name).join(','),
      },
    },
  });
  routeVerb(saved, 'get', 'savedCommands', 'get', {
    async text(command, client) {
      const fields = 'name type values pattern required default description';
      const parameters = await viewText(client, command.parameters, { fields });
      return `${await viewText(client, command)}\n\n${parameters}`;
    },
  });
  routeVerb(saved, 'create <name> <argv...>', 'savedCommands', 'create', {
    about: 'save a command; {{NAME}} in an argument stands for a parameter, and no shell is used',
    examples: ["restart --parameter 'unit:nginx|redis' -- systemctl restart '{{unit}}'"],
    flags,
    input: parametersOf,
    text: ({ id }) => [id],
  });
  routeVerb(saved, 'update [argv...]', 'savedCommands', 'update', {
    about: 'change the settings that are given as flags, or the program and its arguments',
    examples: ['--timeout 2m', "--parameter 'unit:nginx|redis' -- systemctl reload '{{unit}}'"],
    flags: { ...flags, '--name <name>': 'new name' },
    notes: '\n--parameter replaces all parameters: repeat the flag for each one that should remain.\n',
    input: changesOf,
  });
  routeVerb(saved, 'delete', 'savedCommands', 'remove', {
    destroys: ['remove the saved command', 'removed'],
  });
  addRun(saved);
}

function changesOf({ argv, ...given }: Given): Item {
  const isArgv = Array.isArray(argv) && argv.length > 0;
  const isGiven = ['name', 'parameter', 'description', 'user', 'cwd', 'timeout'].some(
    (flag) => given[flag] !== undefined,
  );
  if (!isArgv && !isGiven)
    throw new UsageError('say what to change: give a flag, or a program and its arguments after "--"');
  return { ...parametersOf(given), ...(!isArgv && { argv: undefined }) };
}

function parametersOf({ parameter }: Item): Item {
  return Array.isArray(parameter) ? { parameters: parameter.map((text) => parameterOf(String(text))) } : {};
}

function addRun(saved: Command): void {
  const spec = {
    about: 'run a saved command on machines, and print their output',
    examples: [
      'farhand saved-commands run restart web-1 web-2 --param unit=nginx',
      'farhand saved-commands run restart --tags web --param unit=nginx',
    ],
    flags: {
      '--machine <list>': 'further machines to run on, comma-separated',
      '--tags <list>': 'run on every machine with all of these tags',
      '--param <name=value>': 'value of a parameter; repeat the flag for several',
      '--timeout <duration>': 'kill the command and its child processes after this time',
      '--queue-for <duration>': 'wait up to this long for a machine that is offline or busy',
      '--concurrency <count>': 'run on at most COUNT machines at once',
      '--max-failures <number>':
        'after more than NUMBER failures, do not start on the remaining machines (default: no limit)',
      '--detach': 'print the id of the batch, and do not wait for its end',
    },
    notes:
      '\nOutput is printed as it comes. With -o json, each line reports output or the end of a command, as farhand exec does.\nCtrl-C cancels the command on all machines.\n',
  } as const;
  verb(saved, 'run <saved-command> [machines...]', spec, async (client, text, machines, options) => {
    const { machine = [], tags, param: parameters, timeout, concurrency } = options;
    const names = [...machines, ...machine];
    const isNamed = machines.length > 0 || options.machine !== undefined;
    if (isNamed === (tags !== undefined) || (isNamed && names.length === 0))
      throw new UsageError('choose the machines either by name or by --tags');
    const found = await Promise.all(names.map((one) => findMachine(client, one)));
    const machine_ids = tags === undefined ? found : undefined;
    const limits = { timeout, concurrency, queue_for: options.queueFor, max_failures: options.maxFailures };
    const { followBatch } = await import('./exec/many-machines.ts');
    const asked = client.batches.runSaved({
      ...{ saved_command_id: await findSavedCommand(client, text), wait: 0 },
      ...definedFields({ machine_ids, tags, parameters, ...limits }),
    });
    process.exitCode = await followBatch(client, asked, options, true);
  });
}

/** Parses NAME, NAME:TYPE or NAME:A|B, with ? after NAME and =DEFAULT at the end. */
function parameterOf(text: string): Parameter {
  const [, name, optional, kind = 'string', byDefault] =
    /^([^?:=]+)(\?)?(?::([^=]*))?(?:=(.*))?$/s.exec(text) ?? [];
  if (name === undefined)
    throw new UsageError(
      `--parameter ${text}: write NAME, NAME:TYPE or NAME:A|B; add ? after NAME if it is optional, and =DEFAULT at the end if it has a default`,
    );
  const type = types.find((one) => one === kind);
  if (!type && !kind.includes('|'))
    throw new UsageError(
      `--parameter ${text}: ${kind} is no type; write ${types.join(', ')}, or the allowed values as A|B`,
    );
  return {
    name,
    ...(type ? { type } : { type: 'enum', values: kind.split('|') }),
    ...(optional && { required: false }),
    ...(byDefault !== undefined && { default: byDefault }),
  };
}

// Runs farhand-broker or farhand-agent. The arguments decide whether it runs a verb, prints the help or the version, or
// runs the service until a signal ends it.
import { createLogger, isJournal, type Logger, type LogLevel, withPriority } from './logger.ts';
import { failure, letReadersGo, nameProcess, nodeIsGood, wrongNode } from './program-start-and-end.ts';
import { helpText, type Invocation, type Setting } from './read-settings.ts';
import { createNotify, type Notify } from './systemd/notify.ts';
import { collectAtRest } from './v8-garbage-collection.ts';
import { version } from './version.ts';

const serviceVerbs = ['install', 'status', 'uninstall'] as const;
export type Verb = (typeof serviceVerbs)[number];

export interface RunContext {
  log: Logger;
  notify: Notify;
  /** Prints an error and ends the program. */
  fail(error: unknown): void;
}

export interface ServiceProgram {
  name: string;
  /** What the program is, for the first line of its help. */
  summary: string;
  settings: Record<string, Setting>;
  /** Lines at the end of the help, about the verbs. */
  verbsHelp: string;
  /** Called first. Hides or refuses arguments that the other users of the machine must not see in `ps`. */
  checkArguments(argv: readonly string[]): void;
  /** Loads the verbs install, status and uninstall, which a running service does not need. */
  loadServiceVerbs(): Promise<{
    service(verb: Verb, from: Invocation, command: readonly string[]): Promise<number>;
  }>;
  /** Further verbs. Each returns what to print, and the exit code. */
  verbs: Readonly<Record<string, (from: Invocation) => Promise<{ text: string; code: number }>>>;
  /** Reads the settings of the service. `start` starts it and returns a function that closes it. */
  service(from: Invocation): { log_level: LogLevel; start(context: RunContext): () => Promise<void> };
}

/** Runs a program with the arguments and the environment of this process. */
export function runServiceProgram(program: ServiceProgram): void {
  let notify: Notify | undefined;
  function fail(error: unknown): void {
    const { text, code } = failure(program.name, error);
    process.stderr.write(isJournal(process.env) ? withPriority(text, 3) : `${text}\n`);
    // After exit code 78, systemd does not restart the service. `systemctl status` prints the reason, because it is set
    // as the unit's status text before the exit.
    const notified = code === 78 && notify ? notify.ending(text) : undefined;
    if (!notified) process.exit(code);
    void notified.then(() => process.exit(code));
  }

  async function main(): Promise<void> {
    if (!nodeIsGood(process.version)) throw new Error(wrongNode);
    const { env } = process;
    const argv = process.argv.slice(2);
    program.checkArguments(argv);
    // checkArguments() may overwrite the process name, so the name is set afterwards.
    nameProcess(program.name);
    if (await runVerb(program, { argv, env })) return;
    if (argv.includes('--help')) return void process.stdout.write(helpOf(program));
    if (argv.includes('--version')) return void process.stdout.write(`${version}\n`);
    const { log_level, start } = program.service({ argv, env });
    const log = createLogger(program.name, log_level, isJournal(env));
    collectAtRest();
    const notifier = createNotify(env, process.pid, log);
    notify = notifier;
    const close = start({ log, notify, fail });
    const stop = (): void => {
      void notifier.ending('stopping');
      close().then(() => process.exit(0), fail);
    };
    process.once('SIGTERM', stop);
    process.once('SIGINT', stop);
  }

  process.on('unhandledRejection', fail);
  letReadersGo();
  main().catch(fail);
}

/** Runs the verb that the arguments begin with. Returns false if they begin with no verb. */
async function runVerb(program: ServiceProgram, { argv, env }: Invocation): Promise<boolean> {
  const [word = ''] = argv;
  const from = { argv: argv.slice(1), env };
  const serviceVerb = serviceVerbs.find((one) => one === word);
  if (serviceVerb) {
    const { service } = await program.loadServiceVerbs();
    process.exitCode = await service(serviceVerb, from, ownCommand(env));
    return true;
  }
  const verb = Object.hasOwn(program.verbs, word) ? program.verbs[word] : undefined;
  if (!verb) return false;
  const { text, code } = await verb(from);
  process.stdout.write(text);
  process.exitCode = code;
  return true;
}

/**
 * Returns the command line that starts this program again. If the launcher script of a package started the program,
 * this is the script's path, which stays the same after updates.
 */
function ownCommand({ FARHAND_PROGRAM: launcher }: Invocation['env']): string[] {
  return launcher ? [launcher] : [process.execPath, ...process.execArgv, process.argv[1] ?? ''];
}

const helpOf = ({ name, summary, settings, verbsHelp }: ServiceProgram): string =>
  `${helpText(name, summary, settings)}
To run it as a systemd service: ${name} install | status | uninstall, each with --help.
${verbsHelp}`;

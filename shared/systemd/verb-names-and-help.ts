// The names of the service verbs (install, status, uninstall), their line in the help, and the command line of a
// service.
import type { Invocation } from '../read-settings.ts';

const verbs = ['install', 'status', 'uninstall'] as const;
export type Verb = (typeof verbs)[number];

export function isVerb(word: string | undefined): word is Verb {
  return verbs.some((verb) => verb === word);
}

/** Returns the lines about service verbs at the end of a program's help. */
export function verbsHelp(program: string): string {
  return `\nTo run it as a systemd service: ${program} install | status | uninstall, each with --help.\n`;
}

/**
 * Returns the command line that starts this program again. A launcher is preferred, because its path survives updates.
 */
export function ownCommand({ FARHAND_PROGRAM: launcher }: Invocation['env']): string[] {
  return launcher ? [launcher] : [process.execPath, ...process.execArgv, process.argv[1] ?? ''];
}

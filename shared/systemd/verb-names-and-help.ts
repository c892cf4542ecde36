// The names of the service verbs install, status and uninstall, their line of help, and the command to install.
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

/** The command line that starts this program again: the launcher, which survives updates, or Node. */
export function ownCommand({ FARHAND_PROGRAM: launcher }: Invocation['env']): string[] {
  return launcher ? [launcher] : [process.execPath, ...process.execArgv, process.argv[1] ?? ''];
}

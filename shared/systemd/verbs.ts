// The service verbs install, status and uninstall, and the status text about an agent's link.
import type { Invocation } from '../settings.ts';

const verbs = ['install', 'status', 'uninstall'] as const;
export type Verb = (typeof verbs)[number];

export function isVerb(word: string | undefined): word is Verb {
  return verbs.some((verb) => verb === word);
}

/** Returns the lines about service verbs at the end of a program's help. */
export function verbsHelp(program: string): string {
  return `\nTo run it as a systemd service: ${program} install | status | uninstall, each with --help.\n`;
}

/** Returns an agent's text for `systemctl status`. `machineId`: undefined while the agent is not linked. */
export function linkText(broker: string, machineId: string | undefined): string {
  return machineId ? `linked to ${broker} as ${machineId}` : `not linked to ${broker}, trying`;
}

export interface LinkState {
  broker: string;
  machineId: string | undefined;
}

/** Parses a status text of linkText(); undefined for any other text. */
export function linkIn(text: string): LinkState | undefined {
  const [, broker, machineId] = /^(?:not )?linked to (\S+?)(?: as (\S+)|, trying)$/.exec(text) ?? [];
  return broker ? { broker, machineId } : undefined;
}

/** The command line that starts this program again: the launcher, which survives updates, or Node. */
export function ownCommand({ FARHAND_PROGRAM: launcher }: Invocation['env']): string[] {
  return launcher ? [launcher] : [process.execPath, ...process.execArgv, process.argv[1] ?? ''];
}

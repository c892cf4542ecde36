// The service verbs install, status and uninstall, and the status text that an agent reports on its link.
import type { Invocation } from '../settings.ts';

const verbs = ['install', 'status', 'uninstall'] as const;
export type Verb = (typeof verbs)[number];

export function isVerb(word: string | undefined): word is Verb {
  return verbs.some((verb) => verb === word);
}

/** The lines about service verbs at the end of a program's help. */
export function verbsHelp(program: string): string {
  return `\nAs a service of systemd: ${program} install | status | uninstall, each with --help.\n`;
}

/** The status text of an agent for `systemctl status`; `machineId` is given while the agent is linked. */
export function linkText(broker: string, machineId: string | undefined): string {
  return machineId ? `linked to ${broker} as ${machineId}` : `not linked to ${broker}, trying`;
}

export interface LinkState {
  broker: string;
  machineId: string | undefined;
}

/** Parses a status text that `linkText` made; undefined for any other text. */
export function linkIn(text: string): LinkState | undefined {
  const [, broker, machineId] = /^(?:not )?linked to (\S+?)(?: as (\S+)|, trying)$/.exec(text) ?? [];
  return broker ? { broker, machineId } : undefined;
}

/** The command line that starts this program again: the launcher, which survives updates, or Node itself. */
export function ownCommand({ FARHAND_PROGRAM: launcher }: Invocation['env']): string[] {
  return launcher ? [launcher] : [process.execPath, ...process.execArgv, process.argv[1] ?? ''];
}

// The verbs of both programs for their own service, and the status text in which an agent reports its link.
import type { Invocation } from '../settings.ts';

const verbs = ['install', 'status', 'uninstall'] as const;
export type Verb = (typeof verbs)[number];

export function isVerb(word: string | undefined): word is Verb {
  return verbs.some((verb) => verb === word);
}

/** What the help of a program ends with. */
export function verbsHelp(program: string): string {
  return `\nAs a service of systemd: ${program} install | status | uninstall, each with --help.\n`;
}

/** For `systemctl status`; `machineId` while it is linked. */
export function linkText(broker: string, machineId: string | undefined): string {
  return machineId ? `linked to ${broker} as ${machineId}` : `not linked to ${broker}, trying`;
}

export interface LinkState {
  broker: string;
  machineId: string | undefined;
}

/** What such a text says. */
export function linkIn(text: string): LinkState | undefined {
  const [, broker, machineId] = /^(?:not )?linked to (\S+?)(?: as (\S+)|, trying)$/.exec(text) ?? [];
  return broker ? { broker, machineId } : undefined;
}

/** The words that start this very program again; a launcher, which outlives versions, names itself. */
export function ownCommand({ FARHAND_PROGRAM: launcher }: Invocation['env']): string[] {
  return launcher ? [launcher] : [process.execPath, ...process.execArgv, process.argv[1] ?? ''];
}

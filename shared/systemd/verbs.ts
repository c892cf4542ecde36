// What both programs can do about their own service, and the text by which a running agent tells of its link.

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

/** The machine id in such a text. */
export function linkedAs(text: string): string | undefined {
  return /^linked to \S+ as (\S+)$/.exec(text)?.[1];
}

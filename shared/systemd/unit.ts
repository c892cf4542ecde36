// Fills in the template of a systemd unit file: the command, the user, and the optional blocks that apply.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { home, shipped } from '../install-layout.ts';

export interface UnitValues {
  /** Program and arguments of the service; the first is an absolute path. */
  command: readonly string[];
  user: string;
  /** Names of the blocks (`# if NAME` to `# end`) in the template that the unit includes. */
  blocks: readonly string[];
}

/** The unit file of `farhand-agent` or `farhand-broker`, for the given version of systemd. */
export function unitText(name: string, systemd: number, { command, user, blocks }: UnitValues): string {
  const file = shipped(`${name}.service`, () => join(home, name.replace('farhand-', ''), `${name}.service`));
  const applies = [...blocks, ...(systemd >= 254 ? ['systemd-254'] : [])];
  return readFileSync(file, 'utf8')
    .replace(/^# if ([\w-]+)\n([\s\S]*?)^# end\n/gm, (_whole, block: string, lines: string) =>
      applies.includes(block) ? lines : '',
    )
    .replace(/^# .* fills in .*\n/, '')
    .replace('@COMMAND@', () => command.map(quoted).join(' '))
    .replace('@USER@', () => user);
}

/** Quotes a word of a command line for systemd (systemd.service(5), Command lines). */
function quoted(word: string): string {
  const plain = word.replaceAll('%', '%%').replaceAll('$', '$$$$');
  return /^[\w@%+=:,./$-]+$/.test(plain) ? plain : `"${plain.replace(/[\\"]/g, '\\$&')}"`;
}

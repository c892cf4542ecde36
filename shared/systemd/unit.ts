// A unit file as it is installed: the template beside the program, with its command, its user and the blocks that apply.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { home, shipped } from '../install-layout.ts';

export interface UnitValues {
  /** Program and arguments; the first is an absolute path. */
  command: readonly string[];
  user: string;
  /** Blocks (`# if NAME` to `# end`) that stay. */
  blocks: readonly string[];
}

/** The unit of `farhand-agent` or `farhand-broker`, for a systemd of that version. */
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

/** A word of a command line as systemd reads it (systemd.service(5), Command lines). */
function quoted(word: string): string {
  const plain = word.replaceAll('%', '%%').replaceAll('$', '$$$$');
  return /^[\w@%+=:,./$-]+$/.test(plain) ? plain : `"${plain.replace(/[\\"]/g, '\\$&')}"`;
}

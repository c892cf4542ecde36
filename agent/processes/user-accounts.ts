// Looks up the user accounts of this machine that commands run as.
import { readFile } from 'node:fs/promises';
import { userInfo } from 'node:os';

export interface Account {
  name: string;
  uid: number;
  gid: number;
  home: string;
  shell: string;
}

/** The agent's own account. In a container its uid may have no name; the number is then used as the name. */
export function ownAccount(): Account {
  try {
    const { username, uid, gid, homedir, shell } = userInfo();
    return { name: username, uid, gid, home: homedir || '/', shell: shell || '/bin/sh' };
  } catch {
    const uid = process.getuid?.() ?? 0;
    return { name: String(uid), uid, gid: process.getgid?.() ?? 0, home: '/', shell: '/bin/sh' };
  }
}

/** The account called `name` in /etc/passwd. */
export async function accountNamed(name: string): Promise<Account | undefined> {
  const lines = (await readFile('/etc/passwd', 'utf8')).split('\n');
  return lines.map(parseAccount).find((account) => account?.name === name);
}

function parseAccount(line: string): Account | undefined {
  const [name = '', , uid = '', gid = '', , home = '', shell = ''] = line.split(':');
  if (!name || !/^\d+$/.test(uid) || !/^\d+$/.test(gid)) return undefined;
  return { name, uid: Number(uid), gid: Number(gid), home: home || '/', shell: shell || '/bin/sh' };
}

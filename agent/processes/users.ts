// Who a command runs as: accounts of this machine.
import { readFile } from 'node:fs/promises';
import { userInfo } from 'node:os';

export interface Account {
  name: string;
  uid: number;
  gid: number;
  home: string;
  shell: string;
}

/** The agent's own account. A container may run under a number without a name. */
export function ownAccount(): Account {
  try {
    const { username, uid, gid, homedir, shell } = userInfo();
    return { name: username, uid, gid, home: homedir || '/', shell: shell || '/bin/sh' };
  } catch {
    const uid = process.getuid?.() ?? 0;
    return { name: String(uid), uid, gid: process.getgid?.() ?? 0, home: '/', shell: '/bin/sh' };
  }
}

/** The account of that name in /etc/passwd. */
export async function accountNamed(name: string): Promise<Account | undefined> {
  const lines = (await readFile('/etc/passwd', 'utf8')).split('\n');
  return lines.map(parseAccount).find((account) => account?.name === name);
}

function parseAccount(line: string): Account | undefined {
  const [name = '', , uid = '', gid = '', , home = '', shell = ''] = line.split(':');
  if (!name || !/^\d+$/.test(uid) || !/^\d+$/.test(gid)) return undefined;
  return { name, uid: Number(uid), gid: Number(gid), home: home || '/', shell: shell || '/bin/sh' };
}

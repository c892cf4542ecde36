// Names of owners and groups, from /etc/passwd and /etc/group; read again only when those files change.
import { readFile, stat } from 'node:fs/promises';

interface Names {
  byNumber: ReadonlyMap<number, string>;
  byName: ReadonlyMap<string, number>;
}

/** The kernel takes the largest number for "leave it as it is". */
const largestNumber = 2 ** 32 - 2;

export interface Users {
  /** The name, or the number where there is none. */
  owner(uid: number): string;
  group(gid: number): string;
  /** The number of a name, or a number as it is; undefined where there is none. */
  uid(owner: string): number | undefined;
  gid(group: string): number | undefined;
}

/** Asked once per request: answers names as they are now. */
export type AskUsers = () => Promise<Users>;

export function createUsers(passwd = '/etc/passwd', group = '/etc/group'): AskUsers {
  const owners = table(passwd);
  const groups = table(group);
  return async () => {
    const [owner, group] = await Promise.all([owners(), groups()]);
    return {
      owner: (uid) => owner.byNumber.get(uid) ?? String(uid),
      group: (gid) => group.byNumber.get(gid) ?? String(gid),
      uid: (name) => numberOf(owner, name),
      gid: (name) => numberOf(group, name),
    };
  };
}

function table(path: string): () => Promise<Names> {
  let seen = '';
  let names = parse('');
  return async () => {
    const now = await stat(path, { bigint: true }).catch(() => undefined);
    const version = now ? `${now.ino} ${now.size} ${now.mtimeNs}` : '';
    if (version !== seen) {
      names = parse(now ? await readFile(path, 'utf8').catch(() => '') : '');
      seen = version;
    }
    return names;
  };
}

/** A name counts before a number, as for chown: names may consist of digits. */
function numberOf({ byName }: Names, name: string): number | undefined {
  const known = byName.get(name);
  if (known !== undefined || !/^\d{1,10}$/.test(name)) return known;
  return Number(name) <= largestNumber ? Number(name) : undefined;
}

/** Lines of `name:x:number:…`; the first line of a number or name counts, as for the C library. */
function parse(text: string): Names {
  const byNumber = new Map<number, string>();
  const byName = new Map<string, number>();
  for (const line of text.split('\n')) {
    const [name, , id] = line.split(':');
    if (!name || !id || !/^\d+$/.test(id)) continue;
    const number = Number(id);
    if (!byNumber.has(number)) byNumber.set(number, name);
    if (!byName.has(name)) byName.set(name, number);
  }
  return { byNumber, byName };
}

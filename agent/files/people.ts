// Names of owners and groups, from /etc/passwd and /etc/group; read again only when those files change.
import { readFile, stat } from 'node:fs/promises';

type Names = ReadonlyMap<number, string>;

export interface People {
  /** The name, or the number where there is none. */
  owner(uid: number): string;
  group(gid: number): string;
}

/** Asked once per request: answers names as they are now. */
export type AskPeople = () => Promise<People>;

export function openPeople(passwd = '/etc/passwd', group = '/etc/group'): AskPeople {
  const owners = table(passwd);
  const groups = table(group);
  return async () => {
    const [owner, group] = await Promise.all([owners(), groups()]);
    return { owner: (uid) => owner.get(uid) ?? String(uid), group: (gid) => group.get(gid) ?? String(gid) };
  };
}

function table(path: string): () => Promise<Names> {
  let seen = '';
  let names: Names = new Map();
  return async () => {
    const now = await stat(path, { bigint: true }).catch(() => undefined);
    const version = now ? `${now.ino} ${now.size} ${now.mtimeNs}` : '';
    if (version !== seen) {
      names = now ? parse(await readFile(path, 'utf8').catch(() => '')) : new Map();
      seen = version;
    }
    return names;
  };
}

/** Lines of `name:x:number:…`; the first name of a number counts, as for the C library. */
function parse(text: string): Names {
  const names = new Map<number, string>();
  for (const line of text.split('\n')) {
    const [name, , id] = line.split(':');
    if (name && id && /^\d+$/.test(id) && !names.has(Number(id))) names.set(Number(id), name);
  }
  return names;
}

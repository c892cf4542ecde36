// Names of users and groups, from /etc/passwd and /etc/group; read again only when those files change.
import { readFile, stat } from 'node:fs/promises';

/** The kernel takes the largest number for "leave it as it is". */
const largestNumber = 2 ** 32 - 2;

/** Names and numbers of one file: lines of `name:x:number:…`. */
class Names {
  readonly #byNumber = new Map<number, string>();
  readonly #byName = new Map<string, number>();

  /** The first line of a number or name counts, as for the C library. */
  constructor(text: string) {
    for (const line of text.split('\n').reverse()) {
      const [name, , id] = line.split(':');
      if (!name || !id || !/^\d+$/.test(id)) continue;
      this.#byNumber.set(Number(id), name);
      this.#byName.set(name, Number(id));
    }
  }

  /** The name, or the number where there is none. */
  nameOf(number: number): string {
    return this.#byNumber.get(number) ?? String(number);
  }

  /** A name counts before a number, as for chown: names may consist of digits. Undefined where there is neither. */
  numberOf(name: string): number | undefined {
    const known = this.#byName.get(name);
    if (known !== undefined || !/^\d{1,10}$/.test(name)) return known;
    return Number(name) <= largestNumber ? Number(name) : undefined;
  }
}

export interface Users {
  users: Names;
  groups: Names;
}

/** Asked once per request: answers names as they are now. */
export type AskUsers = () => Promise<Users>;

export function createUsers(passwd = '/etc/passwd', group = '/etc/group'): AskUsers {
  const [users, groups] = [namesIn(passwd), namesIn(group)];
  return async () => ({ users: await users(), groups: await groups() });
}

function namesIn(path: string): () => Promise<Names> {
  let seen = '';
  let names = new Names('');
  return async () => {
    const now = await stat(path, { bigint: true }).catch(() => undefined);
    const version = now ? `${now.ino} ${now.size} ${now.mtimeNs}` : '';
    if (version !== seen) names = new Names(now ? await readFile(path, 'utf8').catch(() => '') : '');
    seen = version;
    return names;
  };
}

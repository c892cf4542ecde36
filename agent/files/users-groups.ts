// Maps user and group ids to names, from /etc/passwd and /etc/group. A file is read again only when it
// changes.
import { readFile, stat } from 'node:fs/promises';

/** Largest id. The next number, 2^32 - 1, means "leave the id unchanged" in chown(2). */
const largestNumber = 2 ** 32 - 2;

/** Names and ids of one file with lines of the form `name:x:id:…`. */
class Names {
  readonly #byNumber = new Map<number, string>();
  readonly #byName = new Map<string, number>();

  /** If several lines have the same id or name, the first of them counts, as in the C library. */
  constructor(text: string) {
    for (const line of text.split('\n').reverse()) {
      const [name, , id] = line.split(':');
      if (!name || !id || !/^\d+$/.test(id)) continue;
      this.#byNumber.set(Number(id), name);
      this.#byName.set(name, Number(id));
    }
  }

  /** The name of an id, or the id itself if it has no name. */
  nameOf(number: number): string {
    return this.#byNumber.get(number) ?? String(number);
  }

  /**
   * Returns the id of a name. If the name is unknown but consists of digits, it counts as the id itself, as in
   * chown(1). Returns undefined for other unknown names and for ids that are too large.
   */
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

/** Returns the current names of the machine's users and groups. Called once per request. */
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
    if (version === seen) return names;
    const text = now ? await readFile(path, 'utf8').catch(() => undefined) : '';
    // If the file cannot be read now, for example without file descriptors, the next call tries again.
    if (text === undefined) return names;
    names = new Names(text);
    seen = version;
    return names;
  };
}

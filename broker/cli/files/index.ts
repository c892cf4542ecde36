// The verbs of farhand files: list, read, transfer, move and find files on machines.
import type { Command } from 'commander';
import { definedFields } from '../../../shared/defined-fields.ts';
import { StartError, UsageError } from '../../../shared/errors.ts';
import { type Farhand, FarhandError } from '../../../shared/sdk/index.ts';
import { type Common, verb } from '../declare-verb.ts';
import { hint, print, printJson, size, table } from '../print.ts';
import { confirm } from '../prompt.ts';
import { copyOut, Exit, endSoon, Interrupted, onStop } from '../stdout-stderr-and-exit.ts';
import { printView } from '../verb-from-route.ts';
import { fromTo, isRemote, pathText, resolve } from './remote-path.ts';

type Entry = Awaited<ReturnType<Farhand['files']['stat']>>;

export function addFiles(program: Command): void {
  const files = program
    .command('files')
    .description('work with files on machines; a remote path is MACHINE:PATH');
  addReads(files);
  addTransfers(files);
  addChanges(files);
}

function addReads(files: Command): void {
  const ls = {
    about: 'list a directory',
    examples: ['farhand files ls web-1:/etc', 'farhand files ls web-1:    lists the home directory'],
    flags: { '-a, --all': 'include hidden files' },
  } as const;
  verb(files, 'ls <path>', ls, async (client, text, { all = false, output }) => {
    const path = await resolve(client, text);
    const entries = await client.files.list({ ...path, ...(all && { hidden: all }) }).then(
      (listed) => listed.files,
      async (error: unknown) => {
        if (!(error instanceof FarhandError) || error.code !== 'not_a_directory') throw error;
        return [await client.files.stat(path)];
      },
    );
    await print(output, entries, () => table(entries, columns));
  });
  const cat = { about: 'print files', examples: ['farhand files cat web-1:/etc/hosts'] };
  verb(files, 'cat <paths...>', cat, async (client, texts) => {
    for (const text of texts) await copyOut((await client.files.download(await resolve(client, text))).body);
  });
  const find = {
    about: 'find files below a directory by name or content',
    examples: ["farhand files find web-1:/var/log --name '*.log' --content error"],
    flags: {
      '--name <glob>':
        'glob pattern for the name or, if the pattern has a slash, for the path relative to the directory',
      '--content <text>': 'text that a line must contain',
      '-i, --ignore-case': 'ignore case',
      '-a, --all': 'include hidden files',
      '--limit <count>': 'print at most COUNT matches (default: 1000)',
    },
  } as const;
  verb(files, 'find <path>', find, async (client, text, options) => {
    const { name, content, ignoreCase: ignore_case, all: hidden, limit, output } = options;
    if (name === undefined && content === undefined)
      throw new UsageError('set what to find: --name GLOB or --content TEXT');
    const params = definedFields({ name, content, ignore_case, hidden, limit });
    for await (const found of await client.files.search({ ...(await resolve(client, text)), ...params })) {
      if (output === 'json') printJson(found);
      else if ('entry' in found) await print(output, found, () => [matchText(found)]);
      else hintRest(found.end);
    }
  });
}

const decoded = (text: string, { name_encoding }: Entry): string =>
  Buffer.from(text, name_encoding).toString();

const entryPath = ({ path, name_encoding }: Entry): string =>
  pathText({ path, path_encoding: name_encoding });

/** Cells that decode the base64 texts of an entry. A path that is not UTF-8 is still printed as base64:… */
const entryView = {
  cells: {
    name: (entry: Entry) => decoded(entry.name, entry),
    path: entryPath,
    link_target: (entry: Entry) => entry.link_target && decoded(entry.link_target, entry),
    name_encoding: () => null,
  },
};

const columns = {
  mode: ({ mode, setuid, setgid, sticky }: Entry) =>
    `${mode}${setuid ? 's' : ''}${setgid ? 'g' : ''}${sticky ? 't' : ''}`,
  owner: ({ owner }: Entry) => owner,
  group: ({ group }: Entry) => group,
  size: (entry: Entry) => (entry.size === undefined ? null : size(entry.size)),
  changed: ({ modified_at }: Entry) => modified_at.slice(0, 19).replace('T', ' '),
  name(entry: Entry) {
    const target = entry.link_target === undefined ? '' : ` -> ${decoded(entry.link_target, entry)}`;
    const path = entryPath(entry);
    const inBase64 = path.startsWith('/') ? '' : ` (${path})`;
    return `${decoded(entry.name, entry)}${entry.type === 'directory' ? '/' : ''}${inBase64}${target}`;
  },
};

type Match = { entry: Entry; line?: number | undefined; text?: string | undefined };

function matchText({ entry, line, text }: Match): string {
  const path = entryPath(entry);
  return line === undefined ? path : `${path}:${line}:${text ?? ''}`;
}

function hintRest({ truncated, unreadable }: { truncated: boolean; unreadable: number }): void {
  if (truncated) hint('farhand: there are more matches than --limit; raise it to print them');
  if (unreadable > 0) hint(`farhand: ${unreadable} files could not be read`);
}

const parents = { '-p, --parents': 'create missing parent directories' };

/** Returns an error handler for calls that create a path. It adds advice on --parents if a directory is missing. */
const withParents =
  (isGiven = false) =>
  (error: unknown): never => {
    if (isGiven || !(error instanceof FarhandError) || error.code !== 'file_not_found') throw error;
    const next = 'files put and files mkdir create missing parent directories with --parents';
    throw new StartError(`${error.message} (${error.code}, request ${error.requestId}); ${next}`, 1, {
      cause: error,
    });
  };
const overwrite = { '--overwrite': 'replace an existing file' };

function addTransfers(files: Command): void {
  const puts = {
    about: 'send files or directories to a machine; - is standard input',
    usage: '[options] LOCAL... MACHINE:PATH',
    examples: ['farhand files put site web-1:/srv/', 'tar c . | farhand files put - web-1:/tmp/all.tar'],
    flags: { '--mode <mode>': 'permissions that every sent file gets, such as 0644', ...parents },
    isSlow: true,
  } as const;
  verb(files, 'put <paths...>', puts, put);
  const gets = {
    about: 'fetch files or directories; - is standard output',
    usage: '[options] MACHINE:PATH... LOCAL',
    examples: ['farhand files get web-1:/etc/hosts .', 'farhand files get web-1:/etc/nginx - > nginx.tar'],
    isSlow: true,
  };
  verb(files, 'get <paths...>', gets, get);
  const copies = {
    about: 'copy a file or directory to or from a machine, between machines, or on one machine',
    examples: ['farhand files cp web-1:/srv/site web-2:/srv/'],
    flags: overwrite,
    isSlow: true,
  } as const;
  verb(files, 'cp <from> <to>', copies, async (client, from, to, { overwrite = false, ...options }) => {
    if (!isRemote(from) && !isRemote(to))
      throw new UsageError('one of the two paths must be remote: MACHINE:PATH');
    if (!isRemote(from)) return put(client, [from, to], { ...options, overwrite });
    if (!isRemote(to)) return get(client, [from, to], { ...options, overwrite });
    const [source, target] = [await resolve(client, from), await resolve(client, to)];
    const { machine_id } = source;
    const other = target.machine_id !== machine_id && { destination_machine_id: target.machine_id };
    const params = { machine_id, ...(await fromTo(client, source, target)), overwrite, ...other };
    await printView(client, options.output, await client.files.copy(params), entryView);
  });
}

/** Runs a transfer that Ctrl-C can end. Waits until its partial files are removed, however long that takes. */
async function interruptible<T>(transfer: (signal: AbortSignal) => Promise<T>): Promise<T> {
  const leaving = new AbortController();
  // Signals are handled until the cleanup is done, so that a second Ctrl-C does not leave a partial file.
  let code: number | undefined;
  const forget = onStop((as) => {
    code = as;
    leaving.abort(new Interrupted(as));
  });
  try {
    return await transfer(leaving.signal);
  } catch (error) {
    throw leaving.signal.aborted && !(error instanceof Exit) ? leaving.signal.reason : error;
  } finally {
    forget();
    if (code !== undefined) endSoon(code);
  }
}

function fromAndTo(paths: string[]): { from: string[]; to: string } {
  const to = paths.at(-1);
  if (to === undefined || paths.length < 2)
    throw new UsageError('give at least two paths: the sources, then the target');
  return { from: paths.slice(0, -1), to };
}

type PutOptions = Common & { mode?: string; parents?: true; overwrite?: boolean };

async function put(client: Farhand, texts: string[], options: PutOptions): Promise<void> {
  const { from, to } = fromAndTo(texts);
  const { putEach } = await import('./put.ts');
  const { mode, parents: create_parents, overwrite } = options;
  const params = definedFields({ mode, create_parents, overwrite });
  const paths = await interruptible((signal) => putEach(client, from, to, params, signal)).catch(
    withParents(create_parents),
  );
  await print(options.output, { paths }, () => []);
}

async function get(
  client: Farhand,
  texts: string[],
  options: Common & { overwrite?: boolean },
): Promise<void> {
  const { from, to } = fromAndTo(texts);
  const { getEach } = await import('./get.ts');
  const paths = await interruptible((signal) => getEach(client, from, to, options.overwrite ?? true, signal));
  if (to !== '-') await print(options.output, { paths }, () => []);
}

function addChanges(files: Command): void {
  const moves = {
    about: 'move or rename a file or directory on one machine',
    examples: ['farhand files mv web-1:/a web-1:/b'],
    flags: overwrite,
    isSlow: true,
  } as const;
  verb(files, 'mv <from> <to>', moves, async (client, from, to, { overwrite = false, output }) => {
    const [source, target] = [await resolve(client, from), await resolve(client, to)];
    const { machine_id } = source;
    if (machine_id !== target.machine_id)
      throw new UsageError('mv works only within one machine; between two machines use cp, then rm');
    const params = { machine_id, ...(await fromTo(client, source, target)), overwrite };
    await printView(client, output, await client.files.move(params), entryView);
  });
  const removes = {
    about: 'delete files and directories; a symlink is deleted, not its target',
    examples: ['farhand files rm -r --yes web-1:/srv/old'],
    flags: { '-r, --recursive': 'delete directories with their content', '--yes': 'do not ask' },
    isSlow: true,
  } as const;
  verb(files, 'rm <paths...>', removes, async (client, texts, { recursive = false, yes, output }) => {
    const paths = await Promise.all(texts.map((text) => resolve(client, text)));
    await confirm(yes, `delete ${texts.join(', ')}${recursive ? ' with all content' : ''}`);
    const removed: object[] = [];
    for (const path of paths) {
      const one = await client.files.remove({ ...path, recursive });
      removed.push(one);
      // Printed at once, because the next path may fail.
      if (output === 'text') await print(output, one, () => [`deleted ${pathText(one)}`]);
    }
    if (output === 'json') printJson(removed, 2);
  });
  addCreations(files);
  addAttributes(files);
}

function addCreations(files: Command): void {
  const makes = {
    about: 'create a directory; with -p, an existing directory is no error',
    examples: ['farhand files mkdir -p web-1:/srv/site/img'],
    flags: { ...parents, '--mode <mode>': 'permissions, such as 0755' },
  } as const;
  verb(files, 'mkdir <path>', makes, async (client, text, { parents, mode, output }) => {
    const path = await resolve(client, text);
    const made = await client.files
      .mkdir({ ...path, ...definedFields({ parents, mode }) })
      .catch(withParents(parents))
      .catch(async (error: unknown) => {
        if (!parents || !(error instanceof FarhandError) || error.code !== 'already_exists') throw error;
        const existing = await client.files.stat(path);
        if (existing.type !== 'directory') throw error;
        return existing;
      });
    await print(output, made, () => [made.name_encoding ? entryPath(made) : `${made.path}/`]);
  });
  const touches = {
    about: 'create an empty file, or set the modification time',
    examples: [
      'farhand files touch web-1:/srv/site/.ready',
      'farhand files touch --existing --modified-at 2026-11-21T10:00:00Z web-1:/srv/site',
    ],
    flags: {
      '--modified-at <time>': 'new modification time: a date, or 2h for 2 hours ago (default: now)',
      '--existing': 'fail if the file does not exist',
    },
  } as const;
  verb(files, 'touch <path>', touches, async (client, text, { modifiedAt, existing = false, output }) => {
    const params = { create: !existing, ...definedFields({ modified_at: modifiedAt }) };
    const touched = await client.files.touch({ ...(await resolve(client, text)), ...params });
    await print(output, touched, () => [entryPath(touched)]);
  });
}

function addAttributes(files: Command): void {
  const stat = {
    about: 'print the attributes of a file or directory',
    examples: ['farhand files stat web-1:/srv'],
  };
  verb(files, 'stat <path>', stat, async (client, text, { output }) =>
    printView(client, output, await client.files.stat(await resolve(client, text)), entryView),
  );
  const change = async (client: Farhand, texts: string[], params: object, { output }: Common) => {
    const paths = await Promise.all(texts.map((text) => resolve(client, text)));
    const changed = await Array.fromAsync(paths, (path) => client.files.change({ ...path, ...params }));
    await print(output, changed, () => table(changed, columns));
  };
  const modes = {
    about: 'change the permissions of files',
    examples: ['farhand files chmod 0640 web-1:/srv/a'],
  };
  verb(files, 'chmod <mode> <paths...>', modes, (client, mode, texts, options) =>
    change(client, texts, { mode }, options),
  );
  const owners = {
    about: 'change the owner of files, their group, or both',
    examples: [
      'farhand files chown www-data:www-data web-1:/srv/a',
      'farhand files chown :www-data web-1:/srv/a',
    ],
  };
  verb(files, 'chown <owner[:group]> <paths...>', owners, (client, names, texts, options) => {
    const [, owner, group] = /^([^:]*):?([^:]*)$/.exec(names) ?? [];
    if (!owner && !group) throw new UsageError(`write OWNER, OWNER:GROUP or :GROUP in place of "${names}"`);
    const changes = definedFields({ owner: owner || undefined, group: group || undefined });
    return change(client, texts, changes, options);
  });
}

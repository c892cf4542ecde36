// farhand files: look at, read, write, move and find files on machines; places as scp has them, machine:path.
import { type Command, Option } from 'commander';
import { UsageError } from '../../../shared/errors.ts';
import { type Farhand, FarhandError } from '../../../shared/sdk/index.ts';
import { demandYes } from '../ask.ts';
import { count, given, permissions } from '../flags.ts';
import { clean, hint, print, printFields, printTable, say, sayJson, size } from '../output.ts';
import { Interrupted, onStop } from '../stop.ts';
import { write } from '../told.ts';
import { type Common, verb, withClient } from '../verb.ts';
import { inside, remoteIn, resolve } from './place.ts';

export function addFiles(program: Command): void {
  const files = program.command('files').description('files on machines; machine:path as scp has it');
  verb(
    files,
    'ls <place>',
    'what is in a directory',
    'farhand files ls web-1:/etc',
    'farhand files ls web-1:    the home',
  )
    .option('-a, --all', 'hidden ones too')
    .action(withClient(ls));
  verb(files, 'cat <places...>', 'the bytes of files', 'farhand files cat web-1:/etc/hosts').action(
    withClient(cat),
  );
  addTransfers(files);
  addChanges(files);
  verb(
    files,
    'find <place>',
    'search below a directory',
    "farhand files find web-1:/var/log --name '*.log' --content error",
  )
    .option('--name <glob>', 'a pattern; with a slash over the whole path')
    .option('--content <text>', 'text that a line must hold')
    .option('-i, --ignore-case', 'case makes no difference')
    .option('-a, --all', 'hidden ones too')
    .option('--limit <count>', 'matches at most (1000)', count('--limit'))
    .action(withClient(find));
}

function addTransfers(files: Command): void {
  verb(
    files,
    'put <from...>',
    'send files or directories: put LOCAL... MACHINE:PATH; - is standard input',
    'farhand files put site web-1:/srv/',
    'tar c . | farhand files put - web-1:/tmp/all.tar',
  )
    .usage('[options] LOCAL... MACHINE:PATH')
    .option('--mode <mode>', 'permissions of files, as 0644, also of those in directories', permissions)
    .option('-p, --parents', 'make directories that are missing')
    .action(withClient(putAll));
  verb(
    files,
    'get <from...>',
    'fetch files or directories: get MACHINE:PATH... LOCAL; - is standard output',
    'farhand files get web-1:/etc/hosts .',
    'farhand files get web-1:/etc/nginx - > nginx.tar     a directory there is a tar',
  )
    .usage('[options] MACHINE:PATH... LOCAL')
    .action(withClient(getAll));
}

function addChanges(files: Command): void {
  verb(
    files,
    'cp <from> <to>',
    'copy; from here, to here, or between machines; into a directory where one is there',
    'farhand files cp web-1:/srv/site web-2:/srv/',
  )
    .option('--overwrite', 'replace what is there')
    .action(withClient(cp));
  verb(files, 'mv <from> <to>', 'move or rename on one machine', 'farhand files mv web-1:/a web-1:/b')
    .option('--overwrite', 'replace what is there')
    .action(withClient(mv));
  verb(
    files,
    'rm <places...>',
    'delete; links rather than what they lead to',
    'farhand files rm -r --yes web-1:/srv/old',
  )
    .option('-r, --recursive', 'directories with all that is in them')
    .option('--yes', 'do not ask')
    .action(withClient(rm));
  verb(files, 'mkdir <place>', 'make a directory', 'farhand files mkdir -p web-1:/srv/site/img')
    .option('-p, --parents', 'make those above too; one that exists is no failure')
    .addOption(new Option('--mode <mode>', 'permissions, as 0755').argParser(permissions))
    .action(withClient(mkdir));
}

type Entry = Awaited<ReturnType<Farhand['files']['stat']>>;

async function ls(
  client: Farhand,
  place: string,
  { all, output }: Common & { all?: boolean },
): Promise<void> {
  const where = await resolve(client, place);
  const entries = await client.files.list({ ...where, ...(all && { hidden: true }) }).then(
    ({ files }) => files,
    async (error: unknown) => {
      if (!(error instanceof FarhandError) || error.code !== 'not_a_directory') throw error;
      return [await client.files.stat(where)];
    },
  );
  await printTable(output, entries, {
    mode: modeOf,
    owner: ({ owner }) => owner,
    group: ({ group }) => group,
    size: (entry) => (entry.size === undefined ? null : size(entry.size)),
    changed: ({ modified_at }) => modified_at.slice(0, 19).replace('T', ' '),
    name: (entry) => `${nameIn(entry)}${entry.type === 'directory' ? '/' : ''}${linkIn(entry)}`,
  });
}

const modeOf = ({ mode, setuid, setgid, sticky }: Entry): string =>
  `${mode}${setuid ? 's' : ''}${setgid ? 'g' : ''}${sticky ? 't' : ''}`;
const textOf = (text: string, { name_encoding }: Entry): string =>
  name_encoding ? Buffer.from(text, 'base64').toString() : text;
const nameIn = (entry: Entry): string => textOf(entry.name, entry);
const linkIn = (entry: Entry): string =>
  entry.link_target === undefined ? '' : ` -> ${textOf(entry.link_target, entry)}`;

async function cat(client: Farhand, places: string[], _: Common): Promise<void> {
  for (const place of places) {
    const { body } = await client.files.download(await resolve(client, place));
    if (body) for await (const chunk of body as AsyncIterable<Uint8Array>) await write('stdout', chunk);
  }
}

/** Ctrl-C ends a transfer, and what it has begun is cleared away. */
async function interruptible<T>(transfer: (signal: AbortSignal) => Promise<T>): Promise<T> {
  const leaving = new AbortController();
  // To the end: one more Ctrl-C must not leave half of it.
  const forget = onStop((code) => leaving.abort(new Interrupted(code)));
  try {
    return await transfer(leaving.signal);
  } catch (error) {
    throw leaving.signal.aborted && !(error instanceof Interrupted) ? leaving.signal.reason : error;
  } finally {
    forget();
  }
}

function fromAndTo(told: string[]): { from: string[]; to: string } {
  const to = told.at(-1);
  if (to === undefined || told.length < 2) throw new UsageError('say from where and where to');
  return { from: told.slice(0, -1), to };
}

type PutOptions = Common & { mode?: string; parents?: boolean; overwrite?: boolean };

async function putAll(client: Farhand, told: string[], options: PutOptions): Promise<void> {
  const { mode, parents, overwrite, output } = options;
  const { from, to } = fromAndTo(told);
  const { putEach } = await import('./put.ts');
  const wish = given({ mode, create_parents: parents, overwrite });
  const paths = await interruptible((signal) => putEach(client, from, to, wish, signal));
  print(output, { paths }, () => []);
}

type GetOptions = Common & { overwrite?: boolean };

async function getAll(client: Farhand, told: string[], { overwrite, output }: GetOptions): Promise<void> {
  const { from, to } = fromAndTo(told);
  const { getEach } = await import('./get.ts');
  const paths = await interruptible((signal) => getEach(client, from, to, overwrite ?? true, signal));
  if (to !== '-') print(output, { paths }, () => []);
}

type CopyOptions = Common & { overwrite?: boolean };

async function cp(client: Farhand, from: string, to: string, options: CopyOptions): Promise<void> {
  if (!remoteIn(from) && !remoteIn(to)) throw new UsageError('one of the two must be machine:path');
  const overwrite = options.overwrite ?? false;
  if (!remoteIn(from)) return putAll(client, [from, to], { ...options, overwrite });
  if (!remoteIn(to)) return getAll(client, [from, to], { ...options, overwrite });
  const source = await resolve(client, from);
  const destination = await inside(client, await resolve(client, to), source.path);
  const copied = await client.files.copy({
    machine_id: source.machine_id,
    source: source.path,
    destination: destination.path,
    overwrite,
    ...(destination.machine_id !== source.machine_id && { destination_machine_id: destination.machine_id }),
  });
  const { path, files_copied, bytes_copied } = copied;
  await printFields(options.output, copied, { path, files: files_copied, bytes: size(bytes_copied) });
}

async function mv(
  client: Farhand,
  from: string,
  to: string,
  { overwrite, output }: CopyOptions,
): Promise<void> {
  const [source, target] = [await resolve(client, from), await resolve(client, to)];
  if (source.machine_id !== target.machine_id) {
    throw new UsageError('mv stays on one machine; between two: cp, then rm');
  }
  const destination = await inside(client, target, source.path);
  const moved = await client.files.move({
    machine_id: source.machine_id,
    source: source.path,
    destination: destination.path,
    overwrite: overwrite ?? false,
  });
  await printFields(output, moved, { path: moved.path });
}

type RemoveOptions = Common & { recursive?: boolean; yes?: boolean };

async function rm(
  client: Farhand,
  places: string[],
  { recursive = false, yes, output }: RemoveOptions,
): Promise<void> {
  const where = await Promise.all(places.map((place) => resolve(client, place)));
  await demandYes(yes, `delete ${places.join(', ')}${recursive ? ' with all that is in it' : ''}`);
  const removed: Awaited<ReturnType<Farhand['files']['remove']>>[] = [];
  for (const one of where) removed.push(await client.files.remove({ ...one, recursive }));
  print(output, removed, () => removed.map(({ path }) => `deleted ${path}`));
}

type MkdirOptions = Common & { parents?: boolean; mode?: string };

async function mkdir(client: Farhand, place: string, { parents, mode, output }: MkdirOptions): Promise<void> {
  const where = await resolve(client, place);
  const made = await client.files
    .mkdir({ ...where, ...given({ parents, mode }) })
    .catch(async (error: unknown) => {
      if (!parents || !(error instanceof FarhandError) || error.code !== 'already_exists') throw error;
      const there = await client.files.stat(where);
      if (there.type !== 'directory') throw error;
      return there;
    });
  print(output, made, () => [`${made.path}/`]);
}

interface FindOptions extends Common {
  name?: string;
  content?: string;
  ignoreCase?: boolean;
  all?: boolean;
  limit?: number;
}

async function find(client: Farhand, place: string, options: FindOptions): Promise<void> {
  const { name, content, ignoreCase, all, limit, output } = options;
  if (name === undefined && content === undefined)
    throw new UsageError('say what to find: --name or --content');
  const where = await resolve(client, place);
  const wish = given({ name, content, ignore_case: ignoreCase, hidden: all, limit });
  for await (const found of await client.files.search({ ...where, ...wish })) {
    if (output === 'json') sayJson(found);
    else if ('entry' in found) {
      const { entry, line, text } = found;
      const path = clean(textOf(entry.path, entry));
      say(line === undefined ? path : `${path}:${line}:${clean(text ?? '')}`);
    } else tellRest(found.end);
  }
}

function tellRest({ truncated, unreadable }: { truncated: boolean; unreadable: number }): void {
  if (truncated) hint('farhand: there are more; --limit tells how many are shown');
  if (unreadable > 0) hint(`farhand: ${unreadable} could not be read`);
}

// The agent's search in files, on real files. Tests of refusals and attacks come first.
import { execFileSync } from 'node:child_process';
import { appendFileSync, chmodSync, mkdirSync, symlinkSync, truncateSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import type { Files } from '../../agent/files/index.ts';
import { compileGlob } from '../../agent/files/search/glob.ts';
import type { FileMatch } from '../../proto/types/farhand/agent/v1/FileMatch.ts';
import type { SearchFilesRequest__Output } from '../../proto/types/farhand/agent/v1/SearchFilesRequest.ts';
import type { SearchFilesTail } from '../../proto/types/farhand/agent/v1/SearchFilesTail.ts';
import { call, Disk, isRoot, printed, refused } from '../file-operations-fixture.ts';

let disk: Disk;
let files: Files;
const path = (...parts: string[]): string => disk.path(...parts);

beforeEach(async () => {
  disk = new Disk();
  files = await disk.open();
});
afterEach(() => disk.remove());

interface Found {
  matches: FileMatch[];
  /** Paths relative to the root, sorted. A match in the content of a file ends with ":line". */
  names: string[];
  tail: SearchFilesTail | undefined;
}

async function search(
  more: Partial<Omit<SearchFilesRequest__Output, 'path'>> & { at?: string; signal?: AbortSignal },
): Promise<Found> {
  const { at = disk.root, signal, ...rest } = more;
  const request = {
    ...{ path: Buffer.from(at), name: '', content: '', ignore_case: false, hidden: false, limit: 0 },
    ...rest,
  };
  const found: Found = { matches: [], names: [], tail: undefined };
  for await (const part of files.searchFiles(request, call(signal))) {
    found.matches.push(...(part.matches?.matches ?? []));
    if (part.tail) found.tail = part.tail;
  }
  const nameOf = ({ entry, line }: FileMatch): string =>
    `${String(entry?.path).slice(disk.root.length + 1)}${line ? `:${Number(line)}` : ''}`;
  found.names = found.matches.map(nameOf).sort();
  return found;
}

const matches = (glob: string, name: string, ignoreCase = false): boolean =>
  compileGlob(glob, ignoreCase)(name);

describe('searchFiles', () => {
  test('refuses a file, and paths that are missing, outside or forbidden', async () => {
    writeFileSync(path('file'), 'x');
    await expect(search({ at: path('file') })).rejects.toEqual(refused('not_a_directory'));
    await expect(search({ at: path('missing') })).rejects.toEqual(refused('file_not_found'));
    await expect(search({ at: disk.outside })).rejects.toEqual(refused('permission_denied'));
    await expect(search({ at: disk.forbidden })).rejects.toEqual(refused('permission_denied'));
  });

  test('refuses globs and texts that are too long or too complex', async () => {
    for (const name of ['x'.repeat(1_001), '{a,b}'.repeat(20), `{${'a,'.repeat(400)}}*${'x'.repeat(100)}`]) {
      await expect(search({ name })).rejects.toEqual(refused('invalid_request'));
    }
    for (const content of ['x'.repeat(1_001), 'a\nb', 'a\0']) {
      await expect(search({ content })).rejects.toEqual(refused('invalid_request'));
    }
  });

  test('a glob that would take years as a regular expression takes no time', () => {
    const started = performance.now();
    for (const glob of [
      '*a*a*a*a*a*a*a*b',
      `${'*a'.repeat(200)}*b`,
      `${'?*'.repeat(120)}b`,
      `**/${'*a'.repeat(50)}b/**/x`,
    ]) {
      for (let index = 0; index < 20; index += 1) expect(matches(glob, 'a'.repeat(255))).toBe(false);
      expect(matches(glob, `${'a'.repeat(100)}/`.repeat(20))).toBe(false);
    }
    expect(performance.now() - started).toBeLessThan(2_000);
  });

  test.each<[glob: string, yes: string[], no: string[]]>([
    ['*.ts', ['a.ts', 'x/y/a.ts', '.ts'], ['a.tsx', 'a.ts/b']],
    ['a?c', ['abc', 'aßc', 'x/a🐢c'], ['ac', 'abbc', 'a/c']],
    ['[a-c]x', ['ax', 'cx'], ['dx', '-x']],
    ['[!a-c]x', ['dx'], ['ax']],
    ['[]x]', [']', 'x'], ['a']],
    ['[a', ['[a'], ['a']],
    ['{one,t{w,r}o}.txt', ['one.txt', 'two.txt', 'tro.txt'], ['o.txt']],
    ['{one}', ['{one}'], ['one']],
    ['\\*', ['*'], ['a']],
    ['src/*.ts', ['src/a.ts'], ['a.ts', 'x/src/a.ts', 'src/x/a.ts']],
    ['/src/*', ['src/a'], ['a']],
    ['src/**/a', ['src/a', 'src/x/a', 'src/x/y/a'], ['a', 'src/b', 'x/src/a']],
    ['**/a/**', ['a/b', 'x/a/b/c', 'a'], ['b']],
    ['**', ['a', 'a/b'], []],
    ['(a|b)+', ['(a|b)+'], ['a', 'ab']],
  ])('the glob %s', (glob, yes, no) => {
    for (const name of yes) expect([name, matches(glob, name)]).toEqual([name, true]);
    for (const name of no) expect([name, matches(glob, name)]).toEqual([name, false]);
    expect(matches('ÄB*', 'äbC')).toBe(false);
    expect(matches('ÄB*', 'äbC', true)).toBe(true);
  });

  test('symlinks are found and never followed, and no protected path is reported', async () => {
    symlinkSync(disk.outside, path('out'));
    symlinkSync(join(disk.outside, 'secret'), path('file'));
    symlinkSync('.', path('loop'));
    expect((await search({})).names).toEqual(['file', 'loop', 'out']);
    expect(await search({ content: 'outside' })).toMatchObject({
      names: [],
      tail: { visited: 3, unreadable: 0 },
    });
    expect((await search({ content: 'forbidden' })).names).toEqual([]);
  });

  test('fifos, binary files and holes of sparse files are skipped without blocking', async () => {
    execFileSync('mkfifo', [path('fifo')]);
    writeFileSync(path('binary'), 'word\0');
    writeFileSync(path('hole'), '');
    truncateSync(path('hole'), 2 ** 40);
    writeFileSync(path('text'), 'word');
    expect(await search({ content: 'word' })).toMatchObject({
      names: ['text:1'],
      tail: { visited: 4, unreadable: 0 },
    });
  });

  test.skipIf(!isRoot)(
    'unreadable files are counted, and matches in all others are found (needs root)',
    async () => {
      mkdirSync(path('closed'), { mode: 0o700 });
      writeFileSync(path('secret'), 'word', { mode: 0o600 });
      writeFileSync(path('open'), 'word');
      chmodSync(disk.root, 0o777);
      const child = disk.program(
        `const [root, directory] = ${JSON.stringify([disk.root, path('data')])};
      const files = await createFiles({ roots: [root], home: root, forbidden: [], directory, log: createLogger('test', 'silent') });
      const request = { path: Buffer.from(root), name: '', content: 'word', ignore_case: false, hidden: false, limit: 0 };
      const seen = [];
      for await (const { matches, tail } of files.searchFiles(request, { signal: new AbortController().signal })) {
        for (const { entry } of matches?.matches ?? []) seen.push(String(entry.name));
        if (tail) seen.push(tail.unreadable);
      }
      console.log(JSON.stringify(seen));`,
        65_534,
      );
      await printed(child, '["open",2]');
    },
  );

  test('a glob matches the name or the whole path, and hidden files only on request', async () => {
    for (const name of ['src/sub', '.git', 'src/.cache']) mkdirSync(path(name), { recursive: true });
    for (const name of ['a.ts', 'src/B.ts', 'src/sub/c.ts', '.git/d.ts', 'src/.cache/e.ts', '.f.ts', 'g.js'])
      writeFileSync(path(name), '');
    expect((await search({ name: '*.ts' })).names).toEqual(['a.ts', 'src/B.ts', 'src/sub/c.ts']);
    expect((await search({ name: 'src/*.ts' })).names).toEqual(['src/B.ts']);
    expect((await search({ name: 'b.TS', ignore_case: true })).names).toEqual(['src/B.ts']);
    expect((await search({ name: '*.ts', hidden: true })).names).toHaveLength(6);
    const { matches: found } = await search({ name: 'sub' });
    expect(found).toEqual([
      expect.objectContaining({
        entry: expect.objectContaining({ type: 'FILE_TYPE_DIRECTORY', path: Buffer.from(path('src/sub')) }),
        line: 0,
      }),
    ]);
  });

  test('a name that is not UTF-8 is found and returned unchanged', async () => {
    const name = Buffer.from('caf\xe9', 'latin1');
    writeFileSync(Buffer.concat([Buffer.from(`${disk.root}/`), name]), 'word');
    const { matches: found } = await search({ name: 'caf*', content: 'word' });
    expect(found.map(({ entry }) => entry?.name)).toEqual([name]);
  });

  test('each matching line is reported once with its number, also without a newline at its end, and case-insensitively on request', async () => {
    writeFileSync(path('a'), 'first\r\nword and word\r\n\nWörd ẞ\nword');
    const { matches: found, names } = await search({ content: 'word' });
    expect(names).toEqual(['a:2', 'a:5']);
    expect(found.map(({ text }) => String(text))).toEqual(['word and word', 'word']);
    expect((await search({ content: 'WÖRD', ignore_case: true })).names).toEqual(['a:4']);
    expect((await search({ content: '.*' })).names).toEqual([]);
  });

  test.each([false, true])(
    'lines are counted right over many chunks, ignoring case %s',
    async (ignore_case) => {
      const lines = Array.from({ length: 60_000 }, (_, index) =>
        index % 9_999 === 7 ? 'a Needle' : `line ${index}`,
      );
      writeFileSync(path('a'), lines.join('\n'));
      const { matches: found } = await search({ content: 'Needle', ignore_case });
      const wanted = lines.flatMap((line, index) => (line === 'a Needle' ? [index + 1] : []));
      expect(found.map(({ line }) => line)).toEqual(wanted);
    },
  );

  test('a line of many megabytes is reported once, with a kilobyte around the hit, wherever the hit is', async () => {
    const filler = (length: number): string => 'x'.repeat(length);
    // The second line contains a hit across the border of two chunks (64 KiB). The only hit of the third line is at its
    // very end.
    writeFileSync(path('a'), `one\n${filler(64 * 1024 - 8)}needle${filler(3_000_000)}needle\n`);
    appendFileSync(path('a'), `${filler(5_000_000)}needle\nneedle\n`);
    const { matches: found } = await search({ content: 'needle' });
    expect(found.map(({ line }) => line)).toEqual([2, 3, 4]);
    for (const { text } of found) {
      expect(String(text)).toContain('needle');
      expect(text?.length).toBeLessThanOrEqual(1024);
    }
  });

  test('at most limit hits are sent, and the tail says that there are more', async () => {
    for (let index = 0; index < 300; index += 1) writeFileSync(path(`f${index}`), 'word\nword\n');
    expect(await search({ name: 'f*', limit: 300 })).toMatchObject({
      tail: { truncated: false, visited: 300 },
    });
    const { matches: found, tail } = await search({ content: 'word', limit: 5 });
    expect(found).toHaveLength(5);
    expect(tail).toMatchObject({ truncated: true });
  });

  test('matches go out while the search goes on, and it ends when its reader leaves', async () => {
    for (let index = 0; index < 500; index += 1) writeFileSync(path(`f${index}`), 'word\n');
    const request = {
      path: Buffer.from(disk.root),
      name: '',
      content: 'word',
      ignore_case: false,
      hidden: true,
      limit: 0,
    };
    for await (const part of files.searchFiles(request, call())) {
      expect(part.matches?.matches?.length).toBeLessThan(500);
      break;
    }
    const controller = new AbortController();
    const searching = (async () => {
      for await (const _ of files.searchFiles(request, call(controller.signal)))
        controller.abort(new Error('left'));
    })();
    await expect(searching).rejects.toThrow('left');
  });
});

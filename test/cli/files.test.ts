// farhand files: a transfer between this machine and others is complete or leaves nothing. A hostile machine does no
// harm.
import { spawnSync } from 'node:child_process';
import { once } from 'node:events';
import {
  chmodSync,
  closeSync,
  existsSync,
  lstatSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  statSync,
  symlinkSync,
  truncateSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { readFile } from 'node:fs/promises';
import { createServer, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { join } from 'node:path';
import { describe, expect, onTestFinished, test } from 'vitest';
import { loadPtyMaker } from '../../agent/processes/terminals/pty.ts';
import { getEach } from '../../broker/cli/files/get.ts';
import { encodeHeader, endOfArchive, paddingOf, type TarHeader } from '../../shared/tar/index.ts';
import { createLine, open, type Running } from '../cli-fixture.ts';
import { startFarhand, startWithAgent, temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';

async function startScene() {
  const system = await startFarhand();
  const agent = await system.agent({ name: 'web-1' });
  return {
    system,
    agent,
    farhand: createLine(system),
    there: temporaryFolder('there'),
    here: temporaryFolder('here'),
  };
}

/** Makes a folder with one entry of each type. */
function plant(folder: string): void {
  mkdirSync(join(folder, 'deep/er'), { recursive: true });
  mkdirSync(join(folder, 'empty'));
  writeFileSync(join(folder, 'one'), 'one\n', { mode: 0o600 });
  writeFileSync(join(folder, 'deep/er/run'), '#!/bin/sh\n', { mode: 0o755 });
  writeFileSync(Buffer.concat([Buffer.from(`${folder}/`), Buffer.from([0xff, 0xfe])]), 'no UTF-8');
  symlinkSync('deep/er/run', join(folder, 'link'));
}

const same = (a: string, b: string): void => {
  const { status, stdout } = spawnSync('diff', ['-r', '--no-dereference', a, b], { encoding: 'utf8' });
  expect([status, stdout]).toEqual([0, '']);
};

describe('farhand files', () => {
  test('refuses an impossible transfer before it begins, and leaves nothing partial', async () => {
    const { farhand, there, here } = await startScene();
    mkdirSync(join(here, 'tree'));
    mkdirSync(join(there, 'tree'));
    writeFileSync(join(here, 'file'), 'kept');
    const answers = await Promise.all([
      farhand('files get', ['web-1:/no/such/file', here]),
      farhand('files get', [`web-1:${there}/tree`, join(here, 'tree', '..', 'file')]),
      farhand('files get', [`web-1:${there}/tree`, here]),
      farhand('files put', [join(here, 'missing'), `web-1:${there}`]),
      farhand('files put', ['-', `web-1:${there}`], { input: 'x' }),
      farhand('files rm', [`web-1:${there}/tree`, 'web-9:/x', '--yes']),
    ]);
    for (const { code, err } of answers)
      expect([code, err]).toEqual([1, expect.stringMatching(/^farhand: /)]);
    for (const [verb, args, next] of [
      ['files put', [join(here, 'file'), `web-1:${there}/no/file`], '--parents'],
      ['files mkdir', [`web-1:${there}/no/folder`], '--parents'],
      ['files mkdir', [`web-1:${there}/tree`], 'use files mkdir -p'],
      ['files get', [`web-1:/etc/passwd`, `${join(here, 'no')}/`], 'create this directory'],
    ] as const) {
      const { code, err } = await farhand(verb, [...args]);
      expect([verb, code, err]).toEqual([verb, 1, expect.stringContaining(next)]);
    }
    expect([readdirSync(here).sort(), readdirSync(there)]).toEqual([['file', 'tree'], ['tree']]);
    expect(readFileSync(join(here, 'file'), 'utf8')).toBe('kept');
  });

  test('lists a path that is not UTF-8 in base64, and takes it in this form', async () => {
    const { farhand, there, here } = await startScene();
    const inBase64 = (name: string): string =>
      `base64:${Buffer.from(`${there}/${name}`, 'latin1').toString('base64')}`;
    const [file, directory] = [inBase64('caf\xe9'), inBase64('d\xff')];
    const local = join(here, 'local');
    writeFileSync(local, 'content');
    for (const [verb, args, printed] of [
      ['files mkdir', [`web-1:${directory}`], `${directory}\n`],
      ['files put', [local, `web-1:${directory}`], ''],
      ['files put', [local, `web-1:${file}`], ''],
      ['files find', [`web-1:${there}`, '--name', 'caf*'], `${file}\n`],
      ['files cat', [`web-1:${file}`], 'content'],
      ['files get', [`web-1:${file}`, join(here, 'fetched')], ''],
      ['files rm', [`web-1:${inBase64('d\xff/local')}`, '--yes'], `deleted ${inBase64('d\xff/local')}\n`],
    ] as const) {
      const { code, out, err } = await farhand(verb, [...args]);
      expect([verb, code, out, err]).toEqual([verb, 0, printed, '']);
    }
    expect(readFileSync(join(here, 'fetched'), 'utf8')).toBe('content');
    expect((await farhand('files ls', [`web-1:${there}`])).out).toMatch(/caf\uFFFD \(base64:.*=\)\n/);
    const link = `${there}/link`;
    symlinkSync(Buffer.from('caf\xe9', 'latin1'), link);
    expect((await farhand('files ls', [`web-1:${there}`])).out).toMatch(/ link -> caf\uFFFD\n/);
    expect((await farhand('files find', [`web-1:${there}`, '--name', 'link'])).out).toBe(`${link}\n`);
    const { out } = await farhand('files stat', [`web-1:${link}`]);
    expect(out).toMatch(new RegExp(`^name +link\npath +${link}\n(.*\n)*link target +caf\uFFFD\n$`));
    rmSync(link);
    await farhand('files cp', [`web-1:${file}`, `web-1:${directory}`]);
    await farhand('files mv', [`web-1:${file}`, `web-1:${there}/café`]);
    const names = (folder: string) =>
      readdirSync(Buffer.from(folder, 'latin1'), { encoding: 'latin1' }).sort();
    expect([names(there), names(`${there}/d\xff`)]).toEqual([['cafÃ©', 'd\xff'], ['caf\xe9']]);
  });

  test('refuses a path that is not UTF-8 in another form, and a local name that is not', async () => {
    const { farhand, there, here } = await startScene();
    const name = Buffer.from(`web-1:${there}/caf\xe9`, 'latin1').toString('base64');
    const line = `exec "$@" "$(echo ${name} | base64 -d)"`;
    const raw = await farhand('files mkdir', [], { through: ['sh', '-c', line, 'sh'] });
    expect([raw.code, raw.err]).toEqual([2, expect.stringContaining('write the path as web-1:base64:')]);
    expect(readdirSync(there)).toEqual([]);
    const file = `${there}/caf\xe9`;
    writeFileSync(Buffer.from(file, 'latin1'), '');
    const path = `web-1:base64:${Buffer.from(file, 'latin1').toString('base64')}`;
    const into = await farhand('files get', [path, here]);
    expect([into.code, into.err]).toEqual([
      2,
      expect.stringContaining('a local path that ends in its new name'),
    ]);
    expect(readdirSync(here)).toEqual([]);
  });

  test('puts and gets files, directories, standard input and output', async () => {
    const { farhand, there, here } = await startScene();
    plant(join(here, 'tree'));
    writeFileSync(join(here, 'large'), Buffer.alloc(3_000_000, 'farhand '));
    // A symlink that leads out of the tree is not sent, and the command reports it.
    symlinkSync('/etc/passwd', join(here, 'tree/out'));
    const put = await farhand('files put', [join(here, 'tree'), join(here, 'large'), `web-1:${there}`]);
    expect([put.code, put.err]).toEqual([
      0,
      expect.stringMatching(/^farhand: skipped a symlink: entry out: .*\n$/),
    ]);
    spawnSync('rm', [join(here, 'tree/out')]);
    same(join(here, 'tree'), join(there, 'tree'));
    expect(readFileSync(join(there, 'large'))).toEqual(readFileSync(join(here, 'large')));
    expect(statSync(join(there, 'tree/deep/er/run')).mode & 0o777).toBe(0o755);

    mkdirSync(join(here, 'back'));
    const got = await farhand.json('files get', [
      `web-1:${there}/tree`,
      `web-1:${there}/large`,
      join(here, 'back'),
    ]);
    expect(got.paths).toEqual([join(here, 'back/tree'), join(here, 'back/large')]);
    same(join(here, 'tree'), join(here, 'back/tree'));
    expect(statSync(join(here, 'back/tree/one')).mode & 0o777).toBe(0o600);

    await farhand('files put', ['-', `web-1:${there}/new/in`, '--parents', '--mode', '0640'], {
      input: Buffer.from([0, 255, 10]),
    });
    expect(statSync(join(there, 'new/in')).mode & 0o777).toBe(0o640);
    const [cat, out, tar] = await Promise.all([
      farhand('files cat', [`web-1:${there}/new/in`, `web-1:${there}/tree/one`]),
      farhand('files get', [`web-1:${there}/new/in`, '-']),
      farhand('files get', [`web-1:${there}/tree`, '-']),
    ]);
    expect(cat.stdout).toEqual(Buffer.from([0, 255, 10, ...Buffer.from('one\n')]));
    expect(out.stdout).toEqual(Buffer.from([0, 255, 10]));
    const listed = spawnSync('tar', ['t'], { input: tar.stdout, encoding: 'utf8' });
    expect(listed.stdout).toContain('deep/er/run\n');
  });

  test('a fetched directory gets the mode of its source, as every directory in it does', async () => {
    const { farhand, there, here } = await startScene();
    for (const [name, mode] of [
      ['private', 0o700],
      ['private/open', 0o755],
      ['group', 0o750],
    ] as const) {
      mkdirSync(join(there, name));
      writeFileSync(join(there, name, 'file'), 'x');
      chmodSync(join(there, name), mode);
    }
    await farhand('files get', [`web-1:${there}/private`, `web-1:${there}/group`, here]);
    const modeOf = (name: string): number => statSync(join(here, name)).mode & 0o777;
    expect(['private', 'private/open', 'group'].map(modeOf)).toEqual([0o700, 0o755, 0o750]);
  });

  test('lists, copies, moves, creates, finds and deletes', async () => {
    const { system, farhand, there } = await startScene();
    await system.agent({ name: 'web-2' });
    plant(join(there, 'tree'));
    const list = await farhand('files ls', [`web-1:${there}/tree`]);
    expect(list.out).toMatch(/^0600 +\S+ +\S+ +4 B +\d{4}-\d\d-\d\d [\d:]+ {2}one$/m);
    expect(list.out).toMatch(/link -> deep\/er\/run$/m);
    expect((await farhand('files ls', [`web-1:${there}/tree/one`])).out).toContain('one');
    const copied = await farhand.json('files cp', [`web-1:${there}/tree`, `web-2:${there}/copy`]);
    expect(copied).toMatchObject({ path: join(there, 'copy'), files_copied: 3 });
    const again = await farhand('files cp', [`web-1:${there}/tree/one`, `web-2:${there}/copy/one`]);
    const moved = await farhand('files mv', [`web-1:${there}/tree/one`, `web-1:${there}/two`]);
    expect([again.code, again.err]).toEqual([1, expect.stringMatching(/already_exists.*\n.*--overwrite/)]);
    expect([moved.code, existsSync(join(there, 'two'))]).toEqual([0, true]);
    expect((await farhand('files mkdir', [`web-1:${there}/a/b`])).code).toBe(1);
    expect((await farhand.json('files mkdir', ['-p', `web-1:${there}/a/b`])).path).toBe(join(there, 'a/b'));
    expect((await farhand('files mkdir', ['-p', `web-1:${there}/a/b`])).code).toBe(0);
    const [found, matched] = await Promise.all([
      farhand('files find', [`web-1:${there}`, '--name', 'run']),
      farhand('files find', [`web-1:${there}`, '--content', 'ONE', '--ignore-case']),
    ]);
    expect(found.out.split('\n').sort()).toEqual([
      '',
      join(there, 'copy/deep/er/run'),
      join(there, 'tree/deep/er/run'),
    ]);
    expect(matched.out).toContain(`${join(there, 'two')}:1:one\n`);
    expect((await farhand('files rm', ['--yes', `web-1:${there}/copy`])).err).toContain(
      'directory_not_empty',
    );
    // What was deleted is printed although a later path fails.
    const partly = await farhand('files rm', ['--yes', `web-1:${there}/two`, `web-1:${there}/no`]);
    expect([partly.code, partly.out]).toEqual([1, `deleted ${there}/two\n`]);
    const removed = await farhand.json('files rm', ['-r', '--yes', `web-1:${there}/copy`]);
    expect(removed).toEqual([{ path: join(there, 'copy'), deleted: true }]);
    expect(readdirSync(there).sort()).toEqual(['a', 'tree']);
  });
});

test('a fetch without --overwrite replaces no file that appears during the transfer', async () => {
  const { system, machine_id } = await startWithAgent();
  const folder = temporaryFolder('fetch');
  writeFileSync(join(folder, 'remote'), 'remote');
  const target = join(folder, 'local');
  const { client } = system;
  const download: typeof client.files.download = async (...args) => {
    const response = await client.files.download(...args);
    writeFileSync(target, 'of another program');
    return response;
  };
  const racing = Object.assign(Object.create(client), { files: { ...client.files, download } });
  const signal = new AbortController().signal;
  const fetching = getEach(racing, [`${machine_id}:${folder}/remote`], target, false, signal);
  await expect(fetching).rejects.toThrow('already exists');
  expect([readFileSync(target, 'utf8'), readdirSync(folder).sort()]).toEqual([
    'of another program',
    ['local', 'remote'],
  ]);
});

test('attributes of remote files are printed and changed', async () => {
  const { farhand, there } = await startScene();
  const [path, other] = [join(there, 'a'), join(there, 'b')];
  for (const one of [path, other]) writeFileSync(one, 'x');
  const [stat, changed, wrong, nothing] = [
    await farhand('files stat', [`web-1:${path}`]),
    await farhand.json('files chmod', ['0640', `web-1:${path}`, `web-1:${other}`]),
    await farhand('files chmod', ['rwx', `web-1:${path}`]),
    await farhand('files chown', [':', `web-1:${path}`]),
  ];
  expect(stat.out).toMatch(/^size +1$/m);
  expect(changed.map(({ mode }: { mode: string }) => mode)).toEqual(['0640', '0640']);
  expect(statSync(path).mode & 0o777).toBe(0o640);
  expect([wrong.code, nothing.code]).toEqual([1, 2]);
  // Nothing of an owner that cannot be understood is ignored.
  const colons = await farhand('files chown', ['0:0:0', `web-1:${path}`]);
  expect([colons.code, colons.err]).toEqual([
    2,
    expect.stringContaining('write OWNER, OWNER:GROUP or :GROUP in place of "0:0:0"\n'),
  ]);
  const own = `${process.getuid?.()}:${process.getgid?.()}`;
  expect((await farhand('files chown', [own, `web-1:${path}`])).code).toBe(0);
  const refused = await farhand('files chown', [':no-such-group', `web-1:${path}`]);
  expect([refused.code, refused.err]).toEqual([1, expect.stringContaining('no-such-group')]);
});

describe('farhand files touch', () => {
  const old = new Date('2001-02-03T04:05:06.789Z');

  test('refuses paths that the agent must not create or change, and changes nothing', async () => {
    const { system, agent, farhand, there, here } = await startScene();
    await system.agent({ name: 'rooted', flags: ['--root', there] });
    const [file, out] = [join(there, 'file'), join(here, 'out')];
    for (const path of [file, out]) {
      writeFileSync(path, 'x');
      utimesSync(path, old, old);
    }
    symlinkSync(out, join(there, 'to-file'));
    symlinkSync(join(here, 'new'), join(there, 'to-none'));
    spawnSync('mkfifo', [join(there, 'pipe')]);
    const before = readdirSync(agent.dataDir);
    const cases: [code: string, ...args: string[]][] = [
      ['permission_denied', `rooted:${out}`],
      ['permission_denied', `rooted:${join(here, 'new')}`],
      ['permission_denied', `rooted:${join(there, 'to-file')}`],
      ['permission_denied', `rooted:${join(there, 'to-none')}`],
      ['permission_denied', `web-1:${agent.dataDir}`],
      ['permission_denied', `web-1:${join(agent.dataDir, 'new')}`],
      ['permission_denied', '--existing', `web-1:${process.execPath}`],
      ['file_not_found', '--existing', `web-1:${join(there, 'none')}`],
      ['file_not_found', `web-1:${join(there, 'none/below')}`],
      ['is_a_directory', `web-1:${join(there, 'none')}/`],
      ['not_a_directory', `web-1:${file}/`],
      ['not_a_directory', `web-1:${join(file, 'below')}`],
      ['unsupported_file', `web-1:${join(there, 'pipe')}`],
    ];
    const answers = await Promise.all(cases.map(([, ...args]) => farhand('files touch', args)));
    for (const [at, { code, err }] of answers.entries())
      expect([cases[at], code, err]).toEqual([cases[at], 1, expect.stringContaining(cases[at]?.[0] ?? '')]);
    expect((await farhand('files touch', ['--modified-at', 'noon', `web-1:${file}`])).code).toBe(2);
    expect(readdirSync(there).sort()).toEqual(['file', 'pipe', 'to-file', 'to-none']);
    expect([readdirSync(here), readdirSync(agent.dataDir)]).toEqual([['out'], before]);
    expect([file, out].map((path) => statSync(path).mtime)).toEqual([old, old]);
  });

  test('creates an empty file, and answers as stat does', async () => {
    const { system, agent, farhand, there } = await startScene();
    const [path, timed] = [join(there, 'new'), join(there, 'timed')];
    const start = Date.now();
    const touched = await farhand.json('files touch', [`web-1:${path}`]);
    const { mode, size, mtimeMs } = statSync(path);
    expect([mode & 0o7777, size]).toEqual([0o644, 0]);
    // A file's time may be slightly earlier than Date.now(), because the kernel's clock for files is coarse.
    expect([mtimeMs > start - 100, mtimeMs < Date.now() + 100]).toEqual([true, true]);
    expect(touched).toEqual(await system.client.files.stat({ machine_id: agent.machineId, path }));
    const { out } = await farhand('files touch', [`web-1:${timed}`, '--modified-at', old.toISOString()]);
    expect([out, statSync(timed).mtime]).toEqual([`${timed}\n`, old]);
    // The command follows a symlink inside the roots.
    symlinkSync('target', join(there, 'link'));
    const linked = await farhand.json('files touch', [`web-1:${join(there, 'link')}`]);
    expect([linked.link_target, statSync(join(there, 'target')).size]).toEqual(['target', 0]);
  });

  test('sets only the modification time of an existing path, to the millisecond', async () => {
    const { farhand, there } = await startScene();
    const file = join(there, 'file');
    writeFileSync(file, 'kept', { mode: 0o640 });
    utimesSync(file, old, old);
    symlinkSync('file', join(there, 'link'));
    const linkTime = lstatSync(join(there, 'link')).mtimeMs;
    // These times are hard to set. In floating point seconds, half of all milliseconds are inexact. In place of a
    // negative number, Node sets the present time.
    for (const time of ['2026-11-21T10:00:00.123Z', '2026-11-21T10:00:00.001Z', '1969-12-31T23:59:58.997Z']) {
      const touched = await farhand.json('files touch', [
        `web-1:${join(there, 'link')}`,
        '--modified-at',
        time,
      ]);
      const { mtimeNs, atimeMs, mode } = statSync(file, { bigint: true });
      expect([touched.modified_at, touched.size]).toEqual([time, 4]);
      expect(Math.abs(Number(mtimeNs - BigInt(Date.parse(time)) * 1_000_000n))).toBeLessThan(1_000);
      expect([atimeMs, mode & 0o777n]).toEqual([BigInt(old.getTime()), 0o640n]);
    }
    const [before, copy] = [statSync(file).mtime, join(there, 'copy')];
    await farhand('files cp', [`web-1:${file}`, `web-1:${copy}`]);
    expect(statSync(copy).mtime).toEqual(before);
    expect(lstatSync(join(there, 'link')).mtimeMs).toBe(linkTime);
    utimesSync(there, old, old);
    const start = Date.now();
    await farhand.json('files touch', ['--existing', `web-1:${there}`]);
    await farhand.json('files touch', [`web-1:${file}`]);
    expect([there, file].map((path) => statSync(path).mtimeMs >= start)).toEqual([true, true]);
    expect(readFileSync(file, 'utf8')).toBe('kept');
  });
});

describe('farhand files, in edge cases', () => {
  test('several sources need a directory as target and different names', async () => {
    const { farhand, there, here } = await startScene();
    for (const folder of ['a', 'b']) mkdirSync(join(here, folder));
    for (const path of ['a/x', 'b/x', 'b/y']) writeFileSync(join(here, path), path);
    const [a, b, y] = ['a/x', 'b/x', 'b/y'].map((path) => join(here, path)) as [string, string, string];
    const answers = await Promise.all([
      farhand('files put', [a, y, `web-1:${there}/new`]),
      farhand('files put', [a, b, `web-1:${there}`]),
      farhand('files get', [`web-1:${a}`, `web-1:${y}`, join(here, 'new')]),
      farhand('files get', [`web-1:${a}`, `web-1:${b}`, here]),
    ]);
    expect(answers.map(({ code }) => code)).toEqual([2, 2, 2, 2]);
    expect([readdirSync(there), readdirSync(here).sort()]).toEqual([[], ['a', 'b']]);
  });

  test('copies and moves into a directory, and replaces on either side only with --overwrite', async () => {
    const { farhand, there, here } = await startScene();
    mkdirSync(join(there, 'into'));
    for (const path of ['one', 'two']) writeFileSync(join(there, path), path);
    writeFileSync(join(here, 'one'), 'mine');
    const [up, down] = await Promise.all([
      farhand('files cp', [join(here, 'one'), `web-1:${there}`]),
      farhand('files cp', [`web-1:${there}/one`, here]),
    ]);
    for (const { code, err } of [up, down])
      expect([code, err]).toEqual([1, expect.stringContaining('--overwrite')]);
    expect([join(here, 'one'), join(there, 'one')].map((path) => readFileSync(path, 'utf8'))).toEqual([
      'mine',
      'one',
    ]);
    await farhand.json('files cp', [join(here, 'one'), `web-1:${there}`, '--overwrite']);
    expect(readFileSync(join(there, 'one'), 'utf8')).toBe('mine');
    await farhand.json('files cp', [`web-1:${there}/two`, join(here, 'one'), '--overwrite']);
    expect(readFileSync(join(here, 'one'), 'utf8')).toBe('two');
    await farhand.json('files cp', [`web-1:${there}/one`, `web-1:${there}/into`]);
    await farhand.json('files mv', [`web-1:${there}/two`, `web-1:${there}/into`]);
    expect(readdirSync(join(there, 'into')).sort()).toEqual(['one', 'two']);
  });

  test('puts a tree with --mode, through a symlink to it, with the longest possible names', async () => {
    const { farhand, there, here } = await startScene();
    const long = 'ü'.repeat(127);
    plant(join(here, 'tree'));
    writeFileSync(join(here, long), 'long');
    symlinkSync('tree', join(here, 'link'));
    const put = ['link', long].map((name) => join(here, name));
    await farhand.json('files put', [...put, `web-1:${there}`, '--mode', '0600']);
    expect(statSync(join(there, 'link/deep/er/run')).mode & 0o777).toBe(0o600);
    expect(readdirSync(join(there, 'link/deep'))).toEqual(['er']);
    const back = temporaryFolder('back');
    await farhand.json('files get', [`web-1:${there}/${long}`, back]);
    expect(readdirSync(back)).toEqual([long]);
    expect((await farhand('files put', [...put, `web-1:${there}`, '--mode', 'rw'])).code).toBe(2);
  });

  test('ends after a refusal and on Ctrl-C although standard input stays open', async () => {
    const { farhand, there } = await startScene();
    const quiet = (path: string): Running => {
      const running = farhand.start('files put', ['-', `web-1:${path}`], { input: open });
      running.child.stdin?.write('x');
      return running;
    };
    const refused = await quiet(`${there}/no/such/x`).ended;
    expect([refused.code, refused.err]).toEqual([1, expect.stringContaining('file_not_found')]);
    const waiting = quiet(`${there}/x`);
    await waitFor(() => expect(readdirSync(there)).toHaveLength(1));
    waiting.child.kill('SIGINT');
    expect((await waiting.ended).code).toBe(130);
    await waitFor(() => expect(readdirSync(there)).toEqual([]));
  });

  test('refuses a named pipe, because no signal would end the wait for its writer', async () => {
    const { farhand, there } = await startScene();
    const pipe = join(temporaryFolder('pipe'), 'pipe');
    spawnSync('mkfifo', [pipe]);
    const { code, err } = await farhand('files put', [pipe, `web-1:${there}/x`]);
    expect([code, err]).toEqual([1, expect.stringContaining('with "-" as the source')]);
  });

  test('refuses a directory as standard input, and does not replace a file by nothing', async () => {
    const { farhand, there, here } = await startScene();
    writeFileSync(join(there, 'file'), 'kept');
    const through = ['sh', '-c', 'exec "$@" < .', 'sh'];
    const [put, exec] = await Promise.all([
      farhand('files put', ['-', `web-1:${there}/file`], { through, cwd: here }),
      farhand('exec', ['web-1', '--', `touch ${there}/ran`], { through, cwd: here }),
    ]);
    for (const { code, err } of [put, exec])
      expect([code, err]).toEqual([1, expect.stringContaining('standard input is a directory')]);
    expect(readdirSync(there)).toEqual(['file']);
    expect(readFileSync(join(there, 'file'), 'utf8')).toBe('kept');
  });

  test('writes through a link to a device or pipe, and does not replace the link', async () => {
    const { farhand, there, here } = await startScene();
    writeFileSync(join(there, 'file'), 'content');
    const [pipe, output] = [join(here, 'pipe'), join(here, 'output')];
    spawnSync('mkfifo', [pipe]);
    symlinkSync(pipe, output);
    const [read] = await Promise.all([
      readFile(pipe, 'utf8'),
      farhand.json('files get', [`web-1:${there}/file`, output]),
    ]);
    expect([read, readlinkSync(output)]).toEqual(['content', pipe]);
  });

  test('reads no more of its input after Ctrl-C', async () => {
    const { farhand, there } = await startScene();
    // /dev/zero never ends.
    const running = farhand.start('files put', ['/dev/zero', `web-1:${there}/x`]);
    await waitFor(() => expect(readdirSync(there)).toHaveLength(1));
    running.child.kill('SIGINT');
    const { code, err } = await running.ended;
    expect([code, err]).toEqual([130, 'farhand: interrupted; no partial files are left\n']);
  });

  test('on Ctrl-C names the directory that was partly sent; a download leaves nothing', async () => {
    const { farhand, there, here } = await startScene();
    mkdirSync(join(here, 'tree'));
    writeFileSync(join(here, 'tree/a'), 'a');
    writeFileSync(join(here, 'tree/b'), '');
    truncateSync(join(here, 'tree/b'), 8_000_000_000);
    const put = farhand.start('files put', [join(here, 'tree'), `web-1:${there}`]);
    await waitFor(() => expect(existsSync(join(there, 'tree/a'))).toBe(true));
    put.child.kill('SIGINT');
    const { code, err } = await put.ended;
    expect([code, err]).toEqual([
      130,
      `farhand: interrupted; the files sent so far stay in ${there}/tree; a new transfer begins with the first file\n`,
    ]);
    const back = temporaryFolder('back');
    const get = farhand.start('files get', [`web-1:${here}/tree`, join(back, 'tree')]);
    await waitFor(() => expect(readdirSync(back)).toHaveLength(1));
    get.child.kill('SIGINT');
    expect((await get.ended).err).toBe('farhand: interrupted; no partial files are left\n');
    expect(readdirSync(back)).toEqual([]);
  });

  test.skipIf(!loadPtyMaker())(
    'prints percent and time left for files and directories, in both directions (needs the pty library)',
    async () => {
      const { system, agent, farhand, there, here } = await startScene();
      mkdirSync(join(here, 'tree/.hidden'), { recursive: true });
      writeFileSync(join(here, 'tree/.hidden/large'), '');
      truncateSync(join(here, 'tree/.hidden/large'), 64_000_000);
      const draws = async (...args: string[]): Promise<string> => {
        const { file, env } = farhand.program;
        const { client } = system;
        const { session_id } = await client.sessions.create({
          ...{ machine_id: agent.machineId, shell: process.execPath, args: [file, 'files', ...args], env },
        });
        const terminal = await client.sessions.terminal(await client.sessions.attach({ session_id }));
        const parts: Uint8Array[] = [];
        for await (const bytes of terminal.output) parts.push(Buffer.from(bytes));
        expect(await terminal.ended).toMatchObject({ why: 'ended', exit_code: 0 });
        return Buffer.concat(parts).toString();
      };
      const put = await draws('put', join(here, 'tree'), `web-1:${there}`);
      const got = await Promise.all([
        draws('get', `web-1:${there}/tree`, join(here, 'back')),
        draws('get', `web-1:${there}/tree/.hidden/large`, here),
      ]);
      for (const text of [put, ...got]) {
        expect(text).toMatch(/\[#* *\] \d?\d % .* left/);
        expect(text).toMatch(/\[#+\] 100 % [^\r]*\r\n$/);
      }
    },
  );

  test('an error about a local path names the path and the next step', async () => {
    const scene = await startScene();
    const { farhand, there, here } = scene;
    const { system } = scene;
    await system.client.commands.create({
      machine_id: scene.agent.machineId,
      command: `echo x > ${there}/one`,
    });
    const [read, missing, full, through] = await Promise.all([
      // Reading /proc/self/mem at offset 0 fails.
      farhand('files put', ['/proc/self/mem', `web-1:${there}/x`]),
      farhand('files put', [join(here, 'none'), `web-1:${there}/x`]),
      farhand('files get', [`web-1:${there}/one`, '/dev/full']),
      farhand('files get', [`web-1:${there}/one`, '/etc/passwd/one']),
    ]);
    expect([read, missing, full, through].map(({ code, err }) => [code, err])).toEqual([
      [1, 'farhand: /proc/self/mem: the disk reports an error (EIO); see dmesg\n'],
      [1, `farhand: ${here}/none: does not exist (ENOENT); check the path\n`],
      [1, expect.stringMatching(/^farhand: \/dev\/full: the disk is full \(ENOSPC\); delete files .*\n$/)],
      [1, expect.stringMatching(/^farhand: \/etc\/passwd\/one: .* \(ENOTDIR\); check the path\n$/)],
    ]);
  });
});

// ---- A hostile machine

const id = `mach_${'x'.repeat(22)}`;

/** Starts a broker with the routes that `files get` uses. The test chooses what the machine of this broker sends. */
async function startHostileBroker(
  send: (response: ServerResponse) => void,
  type: 'file' | 'directory' = 'directory',
) {
  const server = createServer((request, response) => {
    if (request.url?.includes('/download')) return send(response);
    const entry = {
      name: '../../evil',
      path: '/x',
      type,
      mode: '7777',
      owner: 'o',
      group: 'g',
      modified_at: '',
    };
    response.setHeader('Content-Type', 'application/json').end(JSON.stringify({ data: entry, meta: {} }));
  }).listen(0, '127.0.0.1');
  await once(server, 'listening');
  onTestFinished(() => server.closeAllConnections());
  onTestFinished(() => void server.close());
  const { port } = server.address() as AddressInfo;
  return createLine({ url: `http://127.0.0.1:${port}`, key: 'service_apikey_x' });
}

type Entry = Partial<TarHeader> & Pick<TarHeader, 'kind' | 'name'> & { body?: string };

function tarOf(entries: Entry[], end = endOfArchive): Buffer {
  const plain = { mode: 0o6777, uid: 0, gid: 0, owner: '', group: '', mtimeNs: 0n };
  const parts = entries.map(({ body = '', ...entry }) =>
    Buffer.concat([
      encodeHeader({ ...plain, size: body.length, ...entry }),
      Buffer.from(body),
      Buffer.alloc(paddingOf(body.length)),
    ]),
  );
  return Buffer.concat([...parts, end]);
}

const file = (name: string, body = 'evil'): Entry => ({ kind: 'file', name, body });
const link = (name: string, target: string): Entry => ({ kind: 'symlink', name, target });

describe('a hostile machine', () => {
  test('writes nothing outside the target directory, whatever its archive contains', async () => {
    const folder = temporaryFolder('victim');
    const safe = join(folder, 'safe');
    mkdirSync(safe);
    const attacks: Record<string, Buffer> = {
      'a name that leads up': tarOf([file('../safe/evil')]),
      'a name from the root': tarOf([file(`${safe}/evil`)]),
      'a name up from inside': tarOf([file('a/../../safe/evil')]),
      'a file through a link': tarOf([link('a', 'b'), file('a/evil')]),
      'a link through a link': tarOf([link('d/e/a', '../..'), link('d/e/a/b', '../../../safe/evil')]),
      'the same name twice': tarOf([file('a'), file('a')]),
      'a device': tarOf([{ kind: 'file', name: 'a' }]).fill('3', 156, 157),
      'no end': tarOf([file('a')], Buffer.alloc(0)),
      nothing: Buffer.alloc(0),
    };
    let archive: Buffer = Buffer.alloc(0);
    const farhand = await startHostileBroker((response) => void response.end(archive));
    for (const [what, bytes] of Object.entries(attacks)) {
      archive = bytes;
      const { code, err } = await farhand('files get', [`${id}:/x`, join(folder, 'got')]);
      expect([what, code, err]).toEqual([what, 1, expect.stringMatching(/^farhand: .*\n$/)]);
      expect([what, readdirSync(folder), readdirSync(safe)]).toEqual([what, ['safe'], []]);
    }
  });

  test('leaves no symlink that leads out, no hard link, and no setuid, setgid or sticky bit', async () => {
    const folder = temporaryFolder('victim');
    const bytes = tarOf([
      { kind: 'directory', name: './' },
      link('passwd', '/etc/passwd'),
      link('up', '../safe'),
      link('good', 'd/plain'),
      { kind: 'link', name: 'hard', target: '/etc/passwd' },
      file('d/plain'),
    ]);
    const farhand = await startHostileBroker((response) => void response.end(bytes));
    const { code, err } = await farhand('files get', [`${id}:/x`, join(folder, 'got')]);
    expect([code, err.match(/skipped/g)?.length]).toEqual([0, 3]);
    expect(readdirSync(join(folder, 'got')).sort()).toEqual(['d', 'good']);
    expect(readlinkSync(join(folder, 'got/good'))).toBe('d/plain');
    expect(lstatSync(join(folder, 'got/d/plain')).mode & 0o7000).toBe(0);
  });

  test('a download that is cut off or interrupted leaves the existing file unchanged', async () => {
    const folder = temporaryFolder('victim');
    writeFileSync(join(folder, 'kept'), 'kept');
    const begin = (response: ServerResponse): void => {
      response.writeHead(200, { 'Content-Length': 1_000_000 }).write(Buffer.alloc(1000));
    };
    const cut = await startHostileBroker((response) => {
      response.writeHead(200, { 'Content-Length': 1_000_000 });
      response.write(Buffer.alloc(1000), () => response.destroy());
    }, 'file');
    const answer = await cut('files get', [`${id}:/x`, join(folder, 'kept')]);
    expect([answer.code, answer.err]).toEqual([1, expect.stringMatching(/^farhand: /)]);
    let asked = (): void => {};
    const waiting = new Promise<void>((resolve) => {
      asked = resolve;
    });
    const slow = await startHostileBroker((response) => {
      begin(response);
      asked();
    }, 'file');
    const running = slow.start('files get', [`${id}:/x`, join(folder, 'kept')]);
    await waiting;
    // A second signal must not interrupt the cleanup.
    running.child.kill('SIGINT');
    running.child.kill('SIGINT');
    expect((await running.ended).code).toBe(130);
    expect([readdirSync(folder), readFileSync(join(folder, 'kept'), 'utf8')]).toEqual([['kept'], 'kept']);
  });

  test.each([
    ['a pipe without a reader', false],
    ['a standard output that is not read', true],
  ])('a download to %s ends on Ctrl-C', async (_what, toOutput) => {
    const pipe = join(temporaryFolder('pipe'), 'pipe');
    spawnSync('mkfifo', [pipe]);
    const asked = Promise.withResolvers<void>();
    const { start } = await startHostileBroker((response) => {
      response.writeHead(200, { 'Content-Length': 1_000_000 }).write(Buffer.alloc(900_000));
      asked.resolve();
    }, 'file');
    // 'r+' opens the pipe without waiting for a reader.
    const stdout = toOutput ? openSync(pipe, 'r+') : -1;
    onTestFinished(() => void (toOutput && closeSync(stdout)));
    const running = start('files get', [`${id}:/x`, toOutput ? '-' : pipe], { stdout });
    await asked.promise;
    running.child.kill('SIGINT');
    const { code, signal, err } = await running.ended;
    expect(err).toContain('interrupted');
    // Node cannot exit while the pipe is neither opened nor read. The program then ends by the signal.
    expect([130, 'SIGINT']).toContain(code ?? signal);
  });
});

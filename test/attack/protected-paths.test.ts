// Files that the agent protects whatever its roots are: every operation, with every kind of path that leads to them.
import { createHook } from 'node:async_hooks';
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import {
  closeSync,
  existsSync,
  linkSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { describe, expect, onTestFinished, test } from 'vitest';
import { requiredCapabilities } from '../../agent/capabilities-by-rpc.ts';
import { createFiles, type Files, type FilesOptions } from '../../agent/files/index.ts';
import { protectedPathsOf } from '../../agent/protected-paths.ts';
import { type AgentCall, type MethodShape, methods } from '../../shared/agent-rpcs.ts';
import { leapingClock } from '../commands-fixture.ts';
import { call as asCall, mayMount, refused } from '../file-operations-fixture.ts';
import { type Answer, quiet, startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';

interface Ground {
  system: TestSystem;
  machineId: string;
  /** Another machine, as the destination of copies. */
  other: string;
  /** A directory that contains the data directory and a harmless file. */
  holder: string;
  data: string;
  identity: string;
  config: string;
  /** A directory in which tests create links and mounts. */
  folder: string;
}

async function createProtectedFiles(): Promise<Ground> {
  const holder = temporaryFolder('holder');
  const [data, config] = [join(holder, 'data'), join(holder, 'agent.toml')];
  writeFileSync(join(holder, 'harmless'), 'harmless machine_id');
  writeFileSync(config, 'name = "machine_id"\n', { mode: 0o600 });
  const system = await startFarhand();
  const { machineId } = await system.agent({ dataDir: data, flags: ['--config', config] });
  const { machineId: other } = await system.agent({ name: 'other' });
  const folder = temporaryFolder('ways');
  return { system, machineId, other, holder, data, identity: join(data, 'identity.json'), config, folder };
}

/** Starts another process that has a directory as its working directory and a file as its standard input. */
async function bystander(cwd: string, file: string): Promise<number> {
  const fd = openSync(file, 'r');
  const child = spawn('sleep', ['600'], { cwd, stdio: [fd, 'ignore', 'ignore'] });
  closeSync(fd);
  onTestFinished(async () => {
    child.kill('SIGKILL');
    if (child.exitCode === null && child.signalCode === null) await once(child, 'exit');
  });
  await once(child, 'spawn');
  return child.pid ?? 0;
}

function mounted(from: string, at: string): string {
  execFileSync('mount', ['--bind', from, at]);
  onTestFinished(() => void execFileSync('umount', ['-l', at]));
  return at;
}

/** Returns the file operations of an agent that serves the whole disk. Its data is in `base`. */
const filesOfAgent = (
  base: string,
  more: Pick<Partial<FilesOptions>, 'forbidden' | 'fixed'>,
): Promise<Files> =>
  createFiles({
    roots: ['/'],
    home: base,
    forbidden: [],
    directory: join(base, 'data'),
    log: quiet,
    ...more,
  });

type Way = [name: string, lead: (ground: Ground) => string | Promise<string>];

/** Paths that lead to the file with the agent's key. */
const waysToFile: Way[] = [
  ['its path', ({ identity }) => identity],
  ['its path with dots', ({ data }) => `${data}/./processes/..//identity.json`],
  ['/proc/self/root', ({ identity }) => `/proc/self/root${identity}`],
  [
    '/proc/PID/root',
    async ({ identity, folder }) => `/proc/${await bystander(folder, '/dev/null')}/root${identity}`,
  ],
  ['/proc/PID/cwd', async ({ data }) => `/proc/${await bystander(data, '/dev/null')}/cwd/identity.json`],
  ['a hard link', ({ identity, folder }) => linked(identity, join(folder, 'hard'))],
  [
    'the directory by a symlink',
    ({ data, folder }) => `${symlinked(data, join(folder, 'dir'))}/identity.json`,
  ],
  [
    'a hard link to another file there',
    ({ data, folder }) => linked(join(data, 'temporary.journal'), join(folder, 'hard')),
  ],
  [
    'a hard link to a file further down',
    ({ data, folder }) => linked(join(data, 'processes/journal'), join(folder, 'hard')),
  ],
  ['the configuration', ({ config }) => config],
  ['a hard link to the configuration', ({ config, folder }) => linked(config, join(folder, 'hard'))],
];
const waysByLink: Way[] = [
  ['a symlink', ({ identity, folder }) => symlinked(identity, join(folder, 'link'))],
  [
    'a symlink to a symlink over /proc',
    ({ identity, folder }) =>
      symlinked(symlinked(`/proc/self/root${identity}`, join(folder, 'one')), join(folder, 'two')),
  ],
  ['/proc/PID/fd', async ({ identity, folder }) => `/proc/${await bystander(folder, identity)}/fd/0`],
];
const waysByMount: Way[] = [
  [
    'a bind mount of the directory',
    ({ data, folder }) => {
      mkdirSync(join(folder, 'mount'));
      return `${mounted(data, join(folder, 'mount'))}/identity.json`;
    },
  ],
  [
    'a bind mount of a directory in it',
    ({ data, folder }) => {
      mkdirSync(join(folder, 'mount'));
      return `${mounted(join(data, 'processes'), join(folder, 'mount'))}/journal`;
    },
  ],
  [
    'a bind mount of its log',
    ({ data, folder }) => {
      writeFileSync(join(folder, 'mount'), '');
      return mounted(join(data, 'activity.log'), join(folder, 'mount'));
    },
  ],
  [
    'a bind mount of the file',
    ({ identity, folder }) => {
      writeFileSync(join(folder, 'mount'), '');
      return mounted(identity, join(folder, 'mount'));
    },
  ],
];

function linked(from: string, to: string): string {
  linkSync(from, to);
  return to;
}

function symlinked(to: string, at: string): string {
  symlinkSync(to, at);
  return at;
}

type Operation = [name: string, run: (ground: Ground, path: string) => Promise<Answer>];

/** Returns a request for the path in its query, such as `GET /stat?path=…&checksum=sha256`. */
const on =
  (method: string, route: string, more = '') =>
  ({ system, machineId }: Ground, path: string): Promise<Answer> =>
    system.call(method, `/machines/${machineId}/files${route}?${at(path)}${more}`);

/** Returns a request for the path in its JSON body. */
const send =
  (method: string, route: string, body: (path: string, ground: Ground) => object) =>
  (ground: Ground, path: string): Promise<Answer> =>
    ground.system.call(method, `/machines/${ground.machineId}/files${route}`, { body: body(path, ground) });

const at = (path: string): string => `path=${encodeURIComponent(path)}`;

const stolen = (source: string, { folder }: Ground): object => ({ source, destination: `${folder}/stolen` });
const replaced = (destination: string, { holder }: Ground): object => ({
  source: `${holder}/harmless`,
  destination,
  overwrite: true,
});

/** Operations on the target of a symlink. */
const reading: Operation[] = [
  ['content', on('GET', '/content')],
  ['download', on('GET', '/download')],
  ['a range', on('GET', '/download', '&offset=1&length=2')],
  ['checksum', on('GET', '/stat', '&checksum=sha256')],
  ['watch', on('GET', '/watch')],
  ['write', send('PUT', '/content', (path) => ({ path, content: 'broken' }))],
  [
    'raw',
    ({ system, machineId }, path) =>
      system.call('PUT', `/machines/${machineId}/files/raw?${at(path)}`, { body: 'broken' }),
  ],
  ['mode', send('PATCH', '', (path) => ({ path, mode: '0666' }))],
  ['touch', send('POST', '/touch', (path) => ({ path }))],
  ['copy', send('POST', '/copy', stolen)],
  [
    'copy to another machine',
    send('POST', '/copy', (source, ground) => ({
      ...stolen(source, ground),
      destination_machine_id: ground.other,
    })),
  ],
];
/** Operations on a path itself, which do not follow a symlink. */
const naming: Operation[] = [
  ['stat', on('GET', '/stat')],
  ['move', send('POST', '/move', stolen)],
  ['move over it', send('POST', '/move', replaced)],
  ['copy over it', send('POST', '/copy', replaced)],
  ['delete', on('DELETE', '')],
  ['mkdir', send('POST', '/mkdir', (path) => ({ path }))],
];

const denied = { status: 403, body: { error: { code: 'permission_denied' } } };

/** Expects that every operation is refused, and that nothing was read, changed or left behind. */
async function expectSafe(ground: Ground, ways: Way[], operations: Operation[]): Promise<void> {
  const { identity, config, folder, data } = ground;
  const state = () => [
    readFileSync(identity, 'utf8'),
    statSync(identity).mode,
    readFileSync(config, 'utf8'),
    statSync(config).mode,
    readdirSync(data).filter((name) => name !== 'activity.log'),
  ];
  const before = state();
  const answers: [string, string, number][] = [];
  for (const [way, lead] of ways) {
    const path = await lead(ground);
    for (const [name, run] of operations) {
      const answer = await run(ground, path);
      if (answer.status !== denied.status) answers.push([way, name, answer.status]);
    }
    expect(existsSync(join(folder, 'stolen'))).toBe(false);
    // Removes the files that the operations have created, because the next path needs the same names.
    for (const name of readdirSync(folder))
      if (name !== 'mount') execFileSync('rm', ['-r', join(folder, name)]);
  }
  expect(answers).toEqual([]);
  expect(state()).toEqual(before);
}

describe('every file operation that the wire has', () => {
  const operations = [...methods.values()].filter(({ name }) =>
    requiredCapabilities[name].some((capability) => capability.startsWith('files:')),
  );

  /** Makes a request in which all path fields that an operation may have are set. */
  function requestOf(shape: MethodShape, path: string, destination: string): unknown {
    const paths = {
      path: Buffer.from(path),
      source: Buffer.from(path),
      destination: Buffer.from(destination),
    };
    const request = { ...paths, open: paths, mode: 0o600, recursive: true, sha256: true, overwrite: true };
    const decoded = (one: unknown): unknown => shape.decodeRequest(shape.encodeRequest(one));
    if (!shape.clientStreams) return decoded(request);
    return (async function* () {
      yield decoded({ open: paths });
      yield decoded({ commit: {} });
    })();
  }

  async function outcomeOf(files: Files, shape: MethodShape, request: unknown): Promise<unknown> {
    // The cast is safe: each handler is called only with a request of its own method.
    const handler = files[shape.key as keyof Files] as (request: unknown, call: AgentCall) => unknown;
    try {
      const answer = handler(request, asCall());
      if (!shape.serverStreams) return await answer;
      for await (const part of answer as AsyncIterable<unknown>) return part;
      return undefined;
    } catch (error) {
      return error;
    }
  }

  test('is refused for protected paths, as a source and as a destination', async () => {
    const base = temporaryFolder('every');
    const secret = join(base, 'secret');
    mkdirSync(join(secret, 'sub'), { recursive: true });
    for (const file of ['secret/key', 'harmless']) writeFileSync(join(base, file), file);
    const files = await filesOfAgent(base, { forbidden: [secret] });
    expect(operations.length).toBeGreaterThanOrEqual(13);
    for (const shape of operations) {
      for (const path of ['secret', 'secret/key', 'secret/sub', 'secret/new', 'data/temporary.journal']) {
        const request = requestOf(shape, join(base, path), join(base, 'elsewhere'));
        expect([shape.name, path, await outcomeOf(files, shape, request)]).toEqual([
          ...[shape.name, path, refused('permission_denied')],
        ]);
      }
      const onto = requestOf(shape, join(base, 'harmless'), join(secret, 'key'));
      if (typeof onto === 'object' && onto && 'destination' in onto)
        expect([shape.name, await outcomeOf(files, shape, onto)]).toEqual([
          ...[shape.name, refused('permission_denied')],
        ]);
    }
    expect(readdirSync(base).sort()).toEqual(['data', 'harmless', 'secret']);
    expect(readdirSync(secret).sort()).toEqual(['key', 'sub']);
    expect(readFileSync(join(secret, 'key'), 'utf8')).toBe('secret/key');
  });

  test('that writes is refused for the agent’s program', async () => {
    const base = temporaryFolder('program');
    const program = join(base, 'program');
    mkdirSync(program);
    for (const file of ['program/main', 'harmless']) writeFileSync(join(base, file), file);
    const files = await filesOfAgent(base, { fixed: [program] });
    const writing = operations.filter(({ name }) => !requiredCapabilities[name].includes('files:read'));
    expect(writing.length).toBeGreaterThanOrEqual(8);
    for (const shape of writing) {
      for (const path of [program, join(program, 'main'), join(program, 'new')]) {
        // A copy of the program is allowed.
        const request = requestOf(shape, shape.name === 'CopyFile' ? join(base, 'harmless') : path, path);
        expect([shape.name, path, await outcomeOf(files, shape, request)]).toEqual([
          ...[shape.name, path, refused('permission_denied')],
        ]);
      }
    }
    expect(readdirSync(program)).toEqual(['main']);
    expect(readFileSync(join(program, 'main'), 'utf8')).toBe('program/main');
  });
});

describe('the file with the agent’s key', () => {
  test('cannot be read, changed or moved under any of its names', async () => {
    await expectSafe(await createProtectedFiles(), waysToFile, [...reading, ...naming]);
  });

  test('cannot be used through a link', async () => {
    await expectSafe(await createProtectedFiles(), waysByLink, reading);
  });

  test.runIf(mayMount)('cannot be used through a mount', async () => {
    for (const way of waysByMount)
      await expectSafe(await createProtectedFiles(), [way], [...reading, ...naming]);
  });
});

describe('the data directory', () => {
  const ways: Way[] = [
    ['its path', ({ data }) => data],
    ['what is in it', ({ data }) => `${data}/processes`],
    ['/proc/self/root', ({ data }) => `/proc/self/root${data}`],
    ['/proc/PID/cwd', async ({ data }) => `/proc/${await bystander(data, '/dev/null')}/cwd/.`],
    ['a symlink', ({ data, folder }) => `${symlinked(data, join(folder, 'dir'))}/.`],
  ];
  const archive = gzipSync(Buffer.alloc(1024));
  const extract = (ground: Ground, path: string): Promise<Answer> =>
    fetch(`${ground.system.url}/api/v1/machines/${ground.machineId}/files/extract?${at(path)}`, {
      method: 'POST',
      headers: { Authorization: `Bearer ${ground.system.key}`, 'Content-Type': 'application/octet-stream' },
      body: archive,
    }).then(async ({ status, headers, ...rest }) => ({ status, headers, body: rest }));
  const operations: Operation[] = [
    ['list', on('GET', '')],
    ['archive', on('GET', '/download', '&archive=tar')],
    ['search', on('GET', '/search', '&content=machine_id')],
    ['watch', on('GET', '/watch', '&recursive=true')],
    ['extract', extract],
    ['mkdir in it', send('POST', '/mkdir', (path) => ({ path: `${path}/new` }))],
    ['mode', send('PATCH', '', (path) => ({ path, mode: '0777' }))],
    ['copy', send('POST', '/copy', stolen)],
    [
      'copy into it',
      send('POST', '/copy', (path, { holder }) => ({
        source: `${holder}/harmless`,
        destination: `${path}/new`,
      })),
    ],
  ];

  test('refuses every operation', async () => {
    await expectSafe(await createProtectedFiles(), ways, operations);
  });

  test('is not moved, replaced or removed with a parent, and is in no archive, search or watch', async () => {
    const ground = await createProtectedFiles();
    const { system, machineId, holder, identity, data } = ground;
    const moves: Operation[] = [
      ['delete', on('DELETE', '', '&recursive=true')],
      ['move', send('POST', '/move', stolen)],
      ['copy', send('POST', '/copy', stolen)],
    ];
    const hidden = linked(identity, join(holder, 'hidden'));
    await expectSafe(ground, [['the directory above', () => holder]], moves);

    const files = `/machines/${machineId}/files`;
    const tar = await system.call('GET', `${files}/download?${at(holder)}&archive=tar`);
    expect(tar.body).toContain('harmless');
    expect(tar.body).not.toContain('private_key');
    expect(tar.body).not.toContain('hidden');
    const found = await system.call('GET', `${files}/search?${at(holder)}&content=machine_id`);
    expect(found.body).toContain('harmless');
    for (const name of [data, hidden, 'private_key', 'agent.toml']) expect(found.body).not.toContain(name);
  });
});

describe('files of the kernel about the agent', () => {
  /** Returns the pid of this agent's spawner. */
  function spawnerPid(): number {
    const children = readFileSync(`/proc/self/task/${process.pid}/children`, 'latin1').trim().split(' ');
    const found = children.find((pid) => {
      const environ = readFileSync(`/proc/${pid}/environ`, 'latin1');
      return environ.includes('=spawner:');
    });
    return Number(found);
  }

  test('cannot be opened: memory, environment, arguments and open files, also of its threads and its spawner', async () => {
    const ground = await createProtectedFiles();
    const { system, machineId, folder, data } = ground;
    // The first command starts the spawner.
    await system.client.commands.create({ machine_id: machineId, command: 'true' });
    const tid = readdirSync('/proc/self/task').find((one) => Number(one) !== process.pid) ?? '';
    const fd = openSync(data, 'r');
    onTestFinished(() => closeSync(fd));
    const places = ['/proc/self', `/proc/${process.pid}`, '/proc/thread-self', `/proc/${tid}`];
    places.push(`/proc/self/task/${tid}`, `/proc/self/root/proc/${process.pid}`, `/proc/${spawnerPid()}`);
    if (mayMount) {
      const proc = join(folder, 'proc');
      mkdirSync(proc);
      execFileSync('mount', ['-t', 'proc', 'proc', proc]);
      onTestFinished(() => void execFileSync('umount', ['-l', proc]));
      places.push(join(proc, String(process.pid)));
    }
    const files = `/machines/${machineId}/files`;
    const open: string[] = [];
    for (const place of places) {
      const calls: [string, string][] = ['environ', 'cmdline', 'maps', 'mem', 'status', `fd/${fd}`].map(
        (name) => [`${place}/${name}`, `${files}/content?${at(`${place}/${name}`)}`],
      );
      calls.push(
        [`list ${place}`, `${files}?${at(`${place}/.`)}`],
        [`list ${place}/fd`, `${files}?${at(`${place}/fd`)}`],
      );
      calls.push([`search ${place}`, `${files}/search?${at(`${place}/.`)}&content=x`]);
      for (const [name, path] of calls) {
        const answer = await system.call('GET', path);
        if (answer.status !== 403) open.push(`${name}: ${answer.status}`);
      }
    }
    expect(open).toEqual([]);
    // The /proc files of other processes can be read like ordinary files, except the file with their memory.
    const other = await bystander(folder, '/dev/null');
    expect((await system.call('GET', `${files}/content?path=/proc/${other}/cmdline`)).status).toBe(200);
    expect((await system.call('GET', `${files}/content?path=/proc/${other}/mem`)).status).not.toBe(200);
    const searched = await system.call('GET', `${files}/search?path=/proc/${other}&name=mem&content=ELF`);
    expect(searched.body).not.toContain('"line"');
  });

  test('a command gets no variable of the agent’s own environment', async () => {
    process.env.FARHAND_JOIN_TOKEN = 'S3CRET';
    onTestFinished(() => void delete process.env.FARHAND_JOIN_TOKEN);
    const system = await startFarhand();
    const { machineId: machine_id } = await system.agent();
    const body = { machine_id, command: 'env; tr "\\0" "\\n" < /proc/$PPID/environ' };
    const { stdout } = (await system.call('POST', '/commands', { body })).body.data;
    expect(stdout).toContain('FARHAND_COMMAND_ID=');
    expect(stdout).not.toContain('S3CRET');
  });
});

/** Returns the paths where systemd looks for units; empty without systemd. */
function unitPaths(): string[] {
  try {
    return execFileSync('systemd-analyze', ['unit-paths'], { encoding: 'utf8', stdio: 'pipe' })
      .trim()
      .split('\n');
  } catch {
    return [];
  }
}

describe('the program', () => {
  const never = new AbortController().signal;
  const name = (path: string) => ({ path: Buffer.from(path) });
  const pair = (source: string, destination: string) => ({
    source: Buffer.from(source),
    destination: Buffer.from(destination),
    overwrite: true,
  });

  async function* upload(path: string) {
    yield { open: { path: Buffer.from(path) } } as never;
    yield { commit: { overwrite: true } } as never;
  }

  const changes: [string, (files: Files, program: string, other: string) => Promise<unknown>][] = [
    ['write', (files, program) => files.writeFile(upload(join(program, 'main')), asCall(never))],
    ['add', (files, program) => files.writeFile(upload(join(program, 'new')), asCall(never))],
    [
      'remove',
      (files, program) => files.removeFile({ ...name(join(program, 'main')), recursive: false }, asCall()),
    ],
    ['remove all', (files, program) => files.removeFile({ ...name(program), recursive: true }, asCall())],
    ['move', (files, program, other) => files.moveFile(pair(program, other), asCall())],
    ['replace', (files, program, other) => files.moveFile(pair(other, join(program, 'main')), asCall())],
    ['mode', (files, program) => files.changeFile({ ...name(join(program, 'main')), mode: 0o777 }, asCall())],
    [
      'make',
      (files, program) => files.makeDirectory({ ...name(join(program, 'new')), parents: false }, asCall()),
    ],
  ];

  test('can be read and copied, but not changed', async () => {
    const base = temporaryFolder('program');
    const program = join(base, 'bin');
    mkdirSync(program);
    writeFileSync(join(program, 'main'), 'main');
    writeFileSync(join(base, 'other'), 'other');
    const files = await filesOfAgent(base, { fixed: [program] });
    for (const [what, change] of changes) {
      const outcome = await change(files, program, join(base, 'other')).catch((error: unknown) => error);
      expect([what, outcome]).toEqual([what, refused('permission_denied')]);
    }
    expect(readdirSync(program)).toEqual(['main']);
    expect(readFileSync(join(program, 'main'), 'utf8')).toBe('main');
    expect((await files.copyFile(pair(program, join(base, 'copy')), asCall())).files).toBe(1);
    const all = { name: 'main', content: '', ignore_case: false, hidden: true, limit: 0 };
    const found: unknown[] = [];
    for await (const { matches } of files.searchFiles({ ...name(program), ...all }, asCall()))
      found.push(...(matches?.matches ?? []));
    expect(found).toHaveLength(1);
  });

  test('and the service are protected at the paths of the packages', () => {
    const { secret, program } = protectedPathsOf({
      data_dir: '/var/lib/farhand-agent',
      config: '/etc/farhand/agent.toml',
    });
    expect(secret).toEqual(
      expect.arrayContaining([
        ...['/var/lib/farhand-agent', '/etc/farhand/agent.toml', '/etc/systemd/system/farhand-agent.service'],
        ...[
          '/etc/systemd/system/farhand-agent.service.d',
          '/etc/systemd/system/multi-user.target.wants/farhand-agent.service',
        ],
        '/usr/local/lib/systemd/system/farhand-agent.service',
      ]),
    );
    for (const directory of unitPaths()) {
      for (const name of ['farhand-agent.service', 'farhand-agent.service.d', 'farhand-.service.d'])
        expect(secret).toContain(`${directory}/${name}`);
      expect(program).toContain(`${directory}/service.d`);
    }
    expect(program).toContain(process.execPath);
  });
});

test('a file call after a second without calls needs a few dozen system calls to check the protected paths', async () => {
  const clock = leapingClock();
  const base = temporaryFolder('quiet');
  const { secret, program } = protectedPathsOf({
    data_dir: join(base, 'data'),
    config: join(base, 'agent.toml'),
  });
  mkdirSync(join(base, 'data'));
  const files = await filesOfAgent(base, { forbidden: secret, fixed: program });
  let asked = 0;
  const counting = createHook({
    init(_id, type) {
      if (type.startsWith('FSREQ')) asked += 1;
    },
  }).enable();
  onTestFinished(() => void counting.disable());
  const once = async (): Promise<number> => {
    asked = 0;
    await files.makeDirectory({ path: Buffer.from(join(base, String(made++))), parents: false }, asCall());
    return asked;
  };
  let made = 0;
  await once();
  const busy = await once();
  clock.leap(1_500);
  const afterQuiet = await once();
  expect(afterQuiet).toBeGreaterThan(busy);
  // To check each path and its parents separately would take about four hundred file system calls.
  expect(afterQuiet - busy).toBeLessThan(100);
});

test('protected files are also refused as hard links if another protected file cannot be examined', async () => {
  const base = temporaryFolder('neighbours');
  const secret = join(base, 'secret');
  const levels = Array.from({ length: 15 }, () => 'd'.repeat(250));
  const filled = join(secret, ...levels);
  // The path of the directory is just short enough for lstat(). The path of the first file in it exceeds the limit of
  // 4,096 bytes, so the agent cannot examine this file.
  const deep = join(filled, 'e'.repeat(3_989 - filled.length));
  mkdirSync(deep, { recursive: true });
  execFileSync('touch', ['a'.repeat(200), 'key'], { cwd: deep });
  // rmSync() cannot remove a file whose path is so long.
  onTestFinished(() => void execFileSync('rm', ['-r', secret]));
  const files = await filesOfAgent(base, { forbidden: [secret] });
  const path = Buffer.from(linked(join(deep, 'key'), join(base, 'hard')));
  await expect(files.statFile({ path, sha256: false }, asCall())).rejects.toEqual(
    refused('permission_denied'),
  );
});

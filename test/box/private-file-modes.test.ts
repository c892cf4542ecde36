// The modes of all files that broker and agent create in their data directories. Each file must be private from its
// creation on, whatever the umask. The test traces the system calls of the real programs, because a later chmod would
// be too late.
import { spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { readdirSync, readFileSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { withBroker } from '../../broker/cli/connect-to-broker.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { temporaryFolder } from '../start-farhand.ts';
import { program } from '../start-processes.ts';

const calls = 'open,openat,creat,mkdir,mkdirat,mknod,mknodat,chmod,fchmod,fchmodat,bind';
const traceable = spawnSync('strace', ['-o', '/dev/null', 'true']).status === 0;
const why = traceable ? '' : ' (skipped: strace is missing, or may not trace here)';

/** A system call with a path below a directory. */
interface Seen {
  call: string;
  /** Path relative to the directory; empty for the directory itself. */
  path: string;
  mode: number;
  flags: string;
}

/** Returns the arguments that run a program with a umask and trace its system calls. */
const traced = (umask: string, file: string): string[] => [
  ...['/bin/sh', '-c', 'umask "$0"; exec "$@"', umask],
  ...['strace', '-D', '-f', '-qq', '-s', '4096', '-o', file, '-e', `trace=${calls}`],
];

/** Returns the successful calls on paths below a directory, in order. */
function seenIn(file: string, directory: string): Seen[] {
  return readFileSync(file, 'utf8')
    .split('\n')
    .filter((line) => line.includes(`"${directory}`) && !line.includes(' = -1 '))
    .map((line) => {
      const [, call = '', rest = ''] = /^\d+ +(\w+)\((.*)/.exec(line) ?? [];
      const path = new RegExp(`"${directory}/?([^"]*)"`).exec(rest)?.[1] ?? '';
      const [, mode = '0'] = /, (?:S_IF\w+\|)?(0[0-7]*)(?:\)| <unfinished)/.exec(rest) ?? [];
      return { call, path, mode: Number.parseInt(mode, 8), flags: /O_[A-Z_|]+/.exec(rest)?.[0] ?? '' };
    });
}

/**
 * Describes a system call that lets users other than the owner use a path, even for a moment. Returns undefined for any
 * other call. `known` has the paths that exist; a path that the call creates is added.
 */
function leak({ call, path, mode, flags }: Seen, umask: number, known: Set<string>): string | undefined {
  const isNew = !known.has(path);
  const received = `${call} of ${path} with ${mode.toString(8)}`;
  if (call.startsWith('mkdir')) {
    known.add(path);
    return (mode & ~umask) === 0o700 ? undefined : received;
  }
  if (call.includes('chmod')) return mode & 0o077 ? received : undefined;
  // bind() creates a socket with a mode that depends on the umask, and a chmod follows only later. So the directory of
  // the socket must already be private.
  if (call === 'bind') return known.has('') ? undefined : received;
  if (!call.startsWith('creat') && !call.startsWith('mknod') && !/O_CREAT|O_TMPFILE/.test(flags))
    return undefined;
  known.add(path);
  return !isNew || (mode & ~umask) === 0o600 ? undefined : received;
}

const leaksIn = (seen: Seen[], umask: number): string[] => {
  const known = new Set<string>();
  return seen.flatMap((one) => leak(one, umask, known) ?? []);
};

/**
 * Returns the paths that have a wrong mode at the end, each with this mode. The right mode is 0700 for a directory, and
 * 0600 for a file.
 */
function modesIn(directory: string): string[] {
  const names = ['', ...(readdirSync(directory, { recursive: true }) as string[])];
  return names.flatMap((name) => {
    const status = statSync(join(directory, name));
    const mode = status.mode & 0o7777;
    return mode === (status.isDirectory() ? 0o700 : 0o600) ? [] : [`${name}: ${mode.toString(8)}`];
  });
}

/** Uses every function that makes broker or agent write a file, such as long output. */
async function use(
  client: Farhand,
  url: string,
  key: string,
  machine_id: string,
  folder: string,
): Promise<void> {
  await client.webhooks.create({
    url: 'http://localhost:1/',
    events: ['*'],
    secret: 'a secret of a webhook',
  });
  const command = await client.commands.create({
    machine_id,
    command: 'seq 100000; echo err >&2',
    wait: 10_000,
  });
  expect(command.status).toBe('completed');
  const session = await client.sessions.create({ machine_id, shell: 'cat' });
  await client.sessions.end({ session_id: session.id });
  await client.files.write({ machine_id, path: join(folder, 'written'), content: 'x' });
  // The field `path` comes after the file, so the broker must store the file until it has received the path.
  const form = new FormData();
  form.append('file', new Blob(['x'.repeat(100_000)]), 'x');
  form.append('path', join(folder, 'uploaded'));
  const headers = { Authorization: `Bearer ${key}` };
  const answer = await fetch(`${url}/api/v1/machines/${machine_id}/files/upload`, {
    method: 'POST',
    headers,
    body: form,
  });
  expect(answer.status).toBe(201);
}

async function end(child: ReturnType<typeof program>): Promise<void> {
  const exited = once(child, 'exit');
  child.kill('SIGTERM');
  await exited;
}

/** Runs both programs under a umask. Returns the system calls of each in its directory. */
async function watched(umask: string) {
  const folder = temporaryFolder('modes');
  const [dataDir, agentDir] = [join(folder, 'broker/data'), join(folder, 'agent/data')];
  const [brokerCalls, agentCalls] = [join(folder, 'broker.trace'), join(folder, 'agent.trace')];
  const places = ['--data-dir', dataDir, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
  const broker = program('broker/main.ts', places, traced(umask, brokerCalls));
  const up = await broker.line('broker is up');
  const { key, token } = await withBroker({ dataDir, url: undefined, apiKey: undefined }, async (local) => ({
    key: (await local.keys.create({ name: 'modes', scopes: ['admin'] })).key,
    token: (await local.joinTokens.create({ name: 'modes' })).token,
  }));
  const joining = ['--broker', String(up.grpc), '--join-token', token, '--data-dir', agentDir];
  const agent = program('agent/main.ts', joining, traced(umask, agentCalls));
  const { machine_id } = await broker.line('machine linked');
  const url = String(up.http);
  await use(new Farhand({ baseUrl: url, apiKey: key }), url, key, String(machine_id), folder);
  const running = [...modesIn(dataDir), ...modesIn(agentDir)];
  await end(agent);
  await end(broker);
  return {
    broker: seenIn(brokerCalls, dataDir),
    agent: seenIn(agentCalls, agentDir),
    left: [...running, ...modesIn(dataDir), ...modesIn(agentDir)],
  };
}

test.skipIf(!traceable).each(['0000', '0022'])(
  `all files of broker and agent are private from the start, under a umask of %s${why}`,
  async (umask) => {
    const { broker, agent, left } = await watched(umask);
    expect(leaksIn(broker, Number.parseInt(umask, 8))).toEqual([]);
    expect(leaksIn(agent, Number.parseInt(umask, 8))).toEqual([]);
    expect(left).toEqual([]);
    // The trace is useful only if it contains these calls.
    const named = (seen: Seen[], name: RegExp): boolean => seen.some(({ path }) => name.test(path));
    const brokers = [
      /^\.state\.json-/,
      /^\.authority/,
      /^\.webhooks\.key-/,
      /^history\.db-wal$/,
      /^output\//,
      /^spool\//,
      /^broker\.sock$/,
    ];
    expect(brokers.filter((name) => !named(broker, name))).toEqual([]);
    expect(
      [/^\.identity\.json-/, /^lock\.db$/, /^processes\//].filter((name) => !named(agent, name)),
    ).toEqual([]);
  },
);

test('a trace shows a file, a directory or a socket that others could open for a moment', () => {
  const made = { call: 'openat', path: 'x', mode: 0o600, flags: 'O_WRONLY|O_CREAT' };
  expect(leaksIn([made, { ...made, mode: 0o644 }], 0)).toEqual([]);
  expect(leaksIn([{ ...made, mode: 0o644 }], 0)).toEqual(['openat of x with 644']);
  expect(leaksIn([{ ...made, mode: 0o666 }], 0o022)).toEqual(['openat of x with 666']);
  expect(leaksIn([{ ...made, call: 'mkdir', mode: 0o777 }], 0o022)).toEqual(['mkdir of x with 777']);
  expect(leaksIn([{ ...made, call: 'fchmodat', mode: 0o640 }], 0)).toEqual(['fchmodat of x with 640']);
  expect(leaksIn([{ ...made, call: 'bind', mode: 0 }], 0)).toEqual(['bind of x with 0']);
  const directory = { ...made, call: 'mkdir', path: '', mode: 0o700 };
  expect(leaksIn([directory, { ...made, call: 'bind', mode: 0 }], 0)).toEqual([]);
});

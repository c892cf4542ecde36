// Backups: each is complete or missing, has the state of a single moment although writes go on, and a broker can start
// on it.
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdirSync, mkdtempSync, readdirSync, rmSync, statSync, watch } from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, dirname, join } from 'node:path';
import { text } from 'node:stream/consumers';
import { expect, onTestFinished, test } from 'vitest';
import { withSocket } from '../../broker/cli/call-or-start-local-broker.ts';
import { Farhand, type FarhandError } from '../../shared/sdk/index.ts';
import { shippedProgram } from '../bundled-programs.ts';
import { onOtherDisk } from '../find-file-systems.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { startBrokerProgram } from './broker-program.ts';

const main = shippedProgram('farhand');

interface Backup {
  child: ChildProcess;
  ended: Promise<{ code: number | null; stdout: string; stderr: string }>;
}

function backup(args: string[]): Backup {
  const child = spawn(process.execPath, [main, 'broker', 'backup', ...args], {
    env: { PATH: process.env.PATH },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  onTestFinished(() => void child.kill('SIGKILL'));
  const ended = Promise.all([once(child, 'close'), text(child.stdout), text(child.stderr)]);
  return {
    child,
    ended: ended.then(([[code], stdout, stderr]) => ({ code: code as number | null, stdout, stderr })),
  };
}

/** Returns the path of a directory for a backup. It does not exist yet. */
const place = (): string => join(temporaryFolder('backup'), 'made/here');
/** Copies of the data that a broker has not removed, or that a client has not moved away. */
const copiesIn = (dataDir: string): string[] =>
  readdirSync(dataDir).filter((name) => name.startsWith('.backup-'));

/** Returns the names and modes of a directory's files. */
function filesOf(directory: string): string[] {
  return readdirSync(directory)
    .toSorted()
    .map((name) => `${name} ${(statSync(join(directory, name)).mode & 0o777).toString(8)}`);
}

const whole = ['authority.json 600', 'history.db 600', 'state.json 600', 'webhooks.key 600'];

/** Starts a broker and an agent as separate processes. */
async function programs() {
  const broker = await startBrokerProgram();
  const agent = await broker.agent();
  return { ...broker, agent, machine_id: await broker.machineId() };
}

/** Stores records of 1 MiB each, so that a backup takes long. */
async function fill(client: Farhand, machine_id: string, count: number): Promise<void> {
  const command = "head -c 1048576 /dev/zero | tr '\\0' x";
  await Promise.all(Array.from({ length: count }, () => client.commands.create({ machine_id, command })));
}

/** Resolves when there is a file whose path begins with `path`, or when the backup has ended. */
async function appears(path: string, { ended }: Backup): Promise<void> {
  const watcher = watch(dirname(path));
  const begins = (name: string): boolean => name.startsWith(basename(path));
  const there = new Promise<void>((resolve) => {
    const look = (): void => void (readdirSync(dirname(path)).some(begins) && resolve());
    watcher.on('change', look);
    look();
  });
  await Promise.race([there, ended]);
  watcher.close();
}

// ---- Failures

test('a backup needs a broker on this machine and a new directory outside of its data directory', async () => {
  const { dataDir } = await startFarhand();
  const taken = temporaryFolder('taken');
  const cases: [string[], number, RegExp][] = [
    [['--to', place()], 2, /--data-dir/],
    [['--data-dir', dataDir], 2, /--to/],
    [['--data-dir', dataDir, '--to', taken], 1, /already exists/],
    [['--data-dir', dataDir, '--to', join(dataDir, 'copy')], 2, /outside the data directory/],
    [['--data-dir', dataDir, '--to', dataDir], 2, /outside the data directory/],
  ];
  const answers = await Promise.all(cases.map(([args]) => backup(args).ended));
  for (const [index, [args, code, message]] of cases.entries()) {
    expect([args, answers[index]?.code]).toEqual([args, code]);
    expect(answers[index]?.stderr).toMatch(message);
  }
  expect([readdirSync(taken), copiesIn(dataDir)]).toEqual([[], []]);
});

test('a backup cannot be made over HTTP, whatever the key', async () => {
  const { url, key, dataDir } = await startFarhand();
  const ask = async (headers: Record<string, string>) =>
    (await fetch(`${url}/local/backup`, { method: 'POST', headers })).status;
  expect([await ask({}), await ask({ Authorization: `Bearer ${key}` })]).toEqual([401, 404]);
  expect(copiesIn(dataDir)).toEqual([]);
});

test('a broker that is killed while it copies leaves nothing that looks complete, and its next start removes the rest', async () => {
  const { dataDir, client, machine_id, kill, start } = await programs();
  await fill(client, machine_id, 16);
  const to = place();
  const making = backup(['--data-dir', dataDir, '--to', to]);
  await appears(join(dataDir, '.backup-'), making);
  await kill();
  const { code, stderr } = await making.ended;
  // On a busy machine the signal may arrive after the end of the backup.
  if (code === 0) expect(filesOf(to)).toEqual(whole.slice(0, 3));
  else expect([code, existsSync(to)]).toEqual([1, false]);
  expect(stderr).toMatch(code === 0 ? /^$/ : /^farhand: /);
  for (const copy of copiesIn(dataDir)) expect(readdirSync(join(dataDir, copy))).not.toContain('state.json');
  await start();
  expect(copiesIn(dataDir)).toEqual([]);
});

const otherDisk = onOtherDisk(tmpdir());

test.skipIf(!otherDisk)(
  'on another file system a backup is complete or missing, also after kill -9',
  async () => {
    const { dataDir, client, machine_id, kill, start } = await programs();
    await fill(client, machine_id, 16);
    await client.webhooks.create({
      url: 'https://example.org/',
      events: ['*'],
      secret: 'for us',
      enabled: false,
    });
    const other = mkdtempSync(join(otherDisk ?? '', 'farhand-backup-'));
    onTestFinished(() => rmSync(other, { recursive: true, force: true }));
    const to = join(other, 'copy');
    // A user's directory with a similar name. The backup must not confuse it with its own temporary directory.
    mkdirSync(`${to}.partial`);
    const first = backup(['--data-dir', dataDir, '--to', to]);
    await appears(`${to}.partial-`, first);
    first.child.kill('SIGKILL');
    await first.ended;
    if (existsSync(to)) {
      expect(filesOf(to)).toEqual(whole);
      rmSync(to, { recursive: true });
    }
    const { code, stdout } = await backup(['--data-dir', dataDir, '--to', to, '-o', 'json']).ended;
    const left = readdirSync(other).filter((name) => !name.startsWith('copy.partial-'));
    expect([code, left.sort(), filesOf(to)]).toEqual([0, ['copy', 'copy.partial'], whole]);
    expect(JSON.parse(stdout)).toMatchObject({ directory: to, bytes: expect.any(Number) });
    await kill();
    await start();
    expect(copiesIn(dataDir)).toEqual([]);
  },
);

// ---- Successful backups

test('a backup under load is consistent, and the agent reconnects to a broker that starts on it', async () => {
  const { dataDir, agent, client, machine_id, kill, start } = await programs();
  const { id: webhook_id } = await client.webhooks.create({
    url: 'https://example.org/',
    events: ['file.deleted'],
    secret: 'for both of us',
  });
  await client.commands.create({ machine_id, command: 'echo before' });
  await fill(client, machine_id, 8);
  // Each attempt creates a key, which is stored in state.json, and an idempotency record, which is stored in
  // history.db.
  const attempts: string[] = [];
  let stopped = false;
  const writer = async (name: string): Promise<void> => {
    for (let n = 0; !stopped; n += 1) {
      attempts.push(`${name}-${n}`);
      await client.keys.create(keyOf(`${name}-${n}`), { idempotencyKey: `${name}-${n}` });
    }
  };
  const writers = ['a', 'b', 'c'].map(writer);
  const to = place();
  const { code, stderr, stdout } = await backup(['--data-dir', dataDir, '--to', to]).ended;
  stopped = true;
  await Promise.all(writers);
  expect([code, stderr, stdout.startsWith(to)]).toEqual([0, '', true]);
  expect([filesOf(to), statSync(to).mode & 0o777]).toEqual([whole, 0o700]);
  await kill();

  await start(to);
  await agent.line('linked');
  const { stdout: said } = await client.commands.create({ machine_id, command: 'echo after' });
  expect(said).toBe('after\n');
  const names = new Map<string, string>();
  for await (const { id, name } of client.keys.list()) names.set(name, id);
  // The backup was made while the attempts went on, so it has only some of them. Of each attempt it has either both the
  // key and the idempotency record, or neither.
  const known = attempts.filter((name) => names.has(name));
  expect(known.length).toBeGreaterThan(0);
  expect(known.length).toBeLessThan(attempts.length);
  for (const name of attempts) {
    const repeat = await client.keys.create(keyOf(name), { idempotencyKey: name }).then(
      () => undefined,
      (error: FarhandError) => error.details.id,
    );
    expect([name, repeat]).toEqual([name, names.get(name)]);
  }
  expect(await client.webhooks.get({ webhook_id })).toMatchObject({ enabled: true, disabled_reason: null });
  const texts: string[] = [];
  for await (const { stdout: kept } of client.commands.list()) texts.push(kept);
  expect(texts).toContain('before\n');
  expect(texts.length).toBe(10);
});

const keyOf = (name: string) => ({ name, scopes: ['files:read' as const] });

test('a backup can be made without a running broker, and a broker starts from it', async () => {
  const dataDir = temporaryFolder('broker');
  const system = await startFarhand({ dataDir });
  await system.broker.close();
  const to = place();
  expect((await backup(['--data-dir', dataDir, '--to', to]).ended).code).toBe(0);
  expect(filesOf(to)).toEqual(whole);
  const again = await startFarhand({ dataDir: to });
  const client = new Farhand({ baseUrl: again.url, apiKey: system.key });
  expect((await client.keys.me()).name).toBe('test');
});

test('one of two simultaneous backups is refused', async () => {
  const { dataDir } = await startFarhand();
  await withSocket(dataDir, async (_client, post) => {
    const both = await Promise.allSettled([
      post<{ directory: string }>('/local/backup'),
      post<{ directory: string }>('/local/backup'),
    ]);
    const refused = both.flatMap((one) => (one.status === 'rejected' ? [one.reason as FarhandError] : []));
    expect(refused.map(({ code }) => code)).toEqual(['conflict']);
  });
});

test('a backup leaves the copy of an earlier one alone, which another client may still be moving away', async () => {
  const { dataDir } = await startFarhand();
  await withSocket(dataDir, async (_client, post) => {
    const { directory: first } = await post<{ directory: string }>('/local/backup');
    const files = readdirSync(first);
    const { directory: second } = await post<{ directory: string }>('/local/backup');
    expect(second).not.toBe(first);
    expect([readdirSync(first), readdirSync(second)]).toEqual([files, files]);
  });
});

test('copies that no client has moved away do not add up, and directories of users stay', async () => {
  const dataDir = temporaryFolder('broker');
  mkdirSync(join(dataDir, 'backup-before'));
  await startFarhand({ dataDir });
  await withSocket(dataDir, async (_client, post) => {
    for (let n = 0; n < 4; n += 1) await post('/local/backup');
  });
  expect(copiesIn(dataDir).length).toBe(2);
  expect(existsSync(join(dataDir, 'backup-before'))).toBe(true);
});

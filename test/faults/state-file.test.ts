// The file state.json: a changed file is refused, the file is complete after any failure, and the entries of its outbox
// are applied once.
import { execFileSync } from 'node:child_process';
import {
  chmodSync,
  cpSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { describe, expect, onTestFinished, test } from 'vitest';
import { Events } from '../../broker/event-log.ts';
import type { OutboxEntry } from '../../broker/history/history-database.ts';
import { openHistory } from '../../broker/history/open-sqlite-file.ts';
import { type Machine, openState, type State, type StateTransaction } from '../../broker/state/index.ts';
import type { JoinTokenId, MachineId } from '../../shared/api/shared-schemas.ts';
import { setClock } from '../../shared/clock.ts';
import { StartError } from '../../shared/errors.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { mayMount } from '../file-operations-fixture.ts';
import { quiet, startFarhand, temporaryFolder } from '../start-farhand.ts';

function machine(id: string, name = id): Machine {
  return {
    id: id as MachineId,
    name,
    tags: [],
    public_key: '',
    join_token_id: 'join_x' as JoinTokenId,
    created_at: '2026-01-01T00:00:00.000Z',
  };
}

const put =
  (id: string, name?: string) =>
  (draft: StateTransaction): string => {
    draft.put('machines', machine(id, name));
    return id;
  };

interface File {
  generation: number;
  machines: { id: string; name: string }[];
  outbox: unknown[];
}

function onDisk(folder: string, name = 'state.json'): File {
  return JSON.parse(readFileSync(join(folder, name), 'utf8')) as File;
}

const idsOnDisk = (folder: string, name?: string): string[] =>
  onDisk(folder, name).machines.map(({ id }) => id);

/** Makes the data directory of a broker that has committed two changes: m1, then m2. */
async function usedFolder(folder = temporaryFolder('state')): Promise<string> {
  mkdirSync(folder, { recursive: true });
  const state = await openState(folder);
  await state.change(put('m1'));
  await state.change(put('m2'));
  await state.close();
  return folder;
}

async function refusal(folder: string): Promise<StartError> {
  const error = await openState(folder).then(
    () => undefined,
    (reason: unknown) => reason,
  );
  expect(error).toBeInstanceOf(StartError);
  expect((error as StartError).exitCode).toBe(78);
  return error as StartError;
}

/** Returns the shell command that the error suggests. */
function commandIn(error: StartError): string {
  const command = /to (?:recover|go back to the previous version .*): ((?:mv|cp) .*)$/.exec(
    error.message,
  )?.[1];
  if (!command) throw new Error(`no command in: ${error.message}`);
  return command;
}

const damages: [string, (file: string) => void][] = [
  ['missing', (file) => rmSync(file)],
  ['empty', (file) => truncateSync(file)],
  ['cut short', (file) => truncateSync(file, statSync(file).size - 20)],
  ['of another shape', (file) => writeFileSync(file, '{"version":1,"machines":{}}')],
  ['null', (file) => writeFileSync(file, 'null')],
  ['a list', (file) => writeFileSync(file, '[]')],
  ['of an older version', (file) => writeFileSync(file, '{"version":0}')],
];

describe('a start is refused', () => {
  test.each(damages)('when state.json is %s, with a command that recovers it', async (_what, damage) => {
    const folder = await usedFolder();
    damage(join(folder, 'state.json'));
    const before = readdirSync(folder);
    const error = await refusal(folder);
    expect(readdirSync(folder)).toEqual(before);
    execFileSync('sh', ['-ec', commandIn(error)]);
    expect(existsSync(join(folder, 'state.json.broken'))).toBe(before.includes('state.json'));
    const state = await openState(folder);
    expect([...state.machines.keys()]).toEqual(['m1']);
    await state.change(put('m3'));
    expect(idsOnDisk(folder)).toEqual(['m1', 'm3']);
  });

  test('with a command that also works for a folder name with spaces and quotes', async () => {
    const folder = await usedFolder(join(temporaryFolder('state'), "my broker's"));
    truncateSync(join(folder, 'state.json'));
    const error = await refusal(folder);
    execFileSync('sh', ['-ec', commandIn(error)]);
    expect([...(await openState(folder)).machines.keys()]).toEqual(['m1']);
  });

  test.each(['history.db', 'authority.json'])(
    'when state.json is missing and only %s shows that a broker ran here',
    async (trace) => {
      const folder = temporaryFolder('state');
      writeFileSync(join(folder, trace), '');
      expect((await refusal(folder)).message).toContain(`put state.json from a backup into ${folder}`);
      expect(readdirSync(folder)).toEqual([trace]);
    },
  );

  test('when the only generation is damaged, without a command that could not work', async () => {
    const folder = temporaryFolder('state');
    await (await openState(folder)).close();
    truncateSync(join(folder, 'state.json'));
    expect((await refusal(folder)).message).not.toContain('state.json.last');
  });

  test('when a newer broker wrote state.json, which stays as it is', async () => {
    const folder = await usedFolder();
    const file = join(folder, 'state.json');
    const newer = JSON.stringify({ ...onDisk(folder), checksum: undefined, version: 3 });
    writeFileSync(file, newer);
    expect((await refusal(folder)).message).toContain('newer farhand-broker');
    expect(readFileSync(file, 'utf8')).toBe(newer);
  });

  test('when a broker has lost its state.json, and no new one is created', async () => {
    const first = await startFarhand();
    await first.broker.close();
    rmSync(join(first.dataDir, 'state.json'));
    await expect(startFarhand({ dataDir: first.dataDir })).rejects.toMatchObject({
      name: 'StartError',
      exitCode: 78,
    });
    expect(existsSync(join(first.dataDir, 'state.json'))).toBe(false);
  });

  test.each<[string, (file: string) => void]>([
    ['missing', (file) => rmSync(file)],
    ['empty', (file) => truncateSync(file)],
    ['cut short', (file) => truncateSync(file, 100)],
  ])('when the certificate authority is %s, because every agent pins it', async (_what, damage) => {
    const first = await startFarhand();
    await first.broker.close();
    damage(join(first.dataDir, 'authority.json'));
    await expect(startFarhand({ dataDir: first.dataDir })).rejects.toMatchObject({
      name: 'StartError',
      exitCode: 78,
      message: expect.stringContaining('authority.json'),
    });
  });
});

describe('a change that fails', () => {
  test('in its edit rejects only its caller, and leaves no trace', async () => {
    const folder = await usedFolder();
    const state = await openState(folder);
    const received: OutboxEntry[] = [];
    await state.drainTo(async (entries) => void received.push(...entries));
    const broken = (draft: StateTransaction): never => {
      put('broken')(draft);
      draft.remove('machines', 'm1');
      draft.append({ kind: 'broken' });
      throw new Error('not this one');
    };
    const outcomes = await Promise.allSettled([
      state.change(put('before')),
      state.change(put('beside')),
      state.change(broken),
      state.change(put('after')),
    ]);
    expect(outcomes.map((outcome) => (outcome.status === 'fulfilled' ? outcome.value : 'failed'))).toEqual([
      'before',
      'beside',
      'failed',
      'after',
    ]);
    expect(outcomes[2]).toMatchObject({ reason: { message: 'not this one' } });
    expect([...state.machines.keys()]).toEqual(['m1', 'm2', 'before', 'beside', 'after']);
    expect(idsOnDisk(folder)).toEqual(['m1', 'm2', 'before', 'beside', 'after']);
    expect(received).toEqual([]);
  });

  test('in its edit without other changes commits nothing', async () => {
    const folder = await usedFolder();
    const state = await openState(folder);
    const before = readFileSync(join(folder, 'state.json'));
    await expect(
      state.change(() => {
        throw new Error('no');
      }),
    ).rejects.toThrow('no');
    expect(readFileSync(join(folder, 'state.json'))).toEqual(before);
    expect(state.generation).toBe(3);
  });

  test('at its commit rejects every caller of that commit, and is undone in memory', async () => {
    const folder = await usedFolder();
    const state = await openState(folder);
    const received: OutboxEntry[] = [];
    await state.drainTo(async (entries) => void received.push(...entries));
    const away = `${folder}.away`;
    onTestFinished(() => rmSync(away, { recursive: true, force: true }));
    renameSync(folder, away);
    const outcomes = await Promise.allSettled(
      ['a', 'b', 'c'].map((id) =>
        state.change((draft) => {
          draft.remove('machines', 'm1');
          draft.append({ kind: 'lost' });
          return put(id)(draft);
        }),
      ),
    );
    expect(outcomes.map(({ status }) => status)).toEqual(['rejected', 'rejected', 'rejected']);
    expect([...state.machines.keys()]).toEqual(['m1', 'm2']);
    expect(state.generation).toBe(3);
    renameSync(away, folder);
    expect(idsOnDisk(folder)).toEqual(['m1', 'm2']);
    expect(await state.change(put('d'))).toBe('d');
    expect(idsOnDisk(folder)).toEqual(['m1', 'm2', 'd']);
    expect(received).toEqual([]);
    expect(readdirSync(folder).sort()).toEqual(['state.json', 'state.json.last']);
  });

  test.runIf(mayMount)('on a full disk leaves the old file unchanged, and no other file', async () => {
    const folder = temporaryFolder('full');
    execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', folder]);
    onTestFinished(() => void execFileSync('umount', [folder]));
    await usedFolder(folder);
    const state = await openState(folder);
    const large = state.change((draft) => draft.put('machines', machine('large', 'x'.repeat(100_000))));
    await expect(large).rejects.toMatchObject({ code: 'ENOSPC' });
    expect(readdirSync(folder).sort()).toEqual(['state.json', 'state.json.last']);
    expect([idsOnDisk(folder), [...state.machines.keys()]]).toEqual([
      ['m1', 'm2'],
      ['m1', 'm2'],
    ]);
    await state.change(put('m3'));
    expect(idsOnDisk(folder)).toEqual(['m1', 'm2', 'm3']);
  });
});

describe('a change', () => {
  test('is on disk before it resolves, one after another', async () => {
    const folder = temporaryFolder('state');
    const state = await openState(folder);
    for (const id of ['a', 'b', 'c']) {
      expect(await state.change(put(id))).toBe(id);
      expect(idsOnDisk(folder)).toContain(id);
    }
    expect(onDisk(folder).generation).toBe(4);
  });

  test('sees earlier changes, and is not visible before it is committed', async () => {
    const folder = temporaryFolder('state');
    const state = await openState(folder);
    const first = state.change(put('a', 'old'));
    const second = state.change((draft) => {
      const before = draft.get('machines', 'a');
      draft.put('machines', machine('a', 'new'));
      return [before?.name, draft.all('machines').length, state.machines.get('a')?.name];
    });
    expect(state.machines.size).toBe(0);
    await first;
    expect(await second).toEqual(['old', 1, 'old']);
    expect(state.machines.get('a')?.name).toBe('new');
  });

  test('shares its commit with other changes that arrive meanwhile, and each change gets its own result', async () => {
    const folder = temporaryFolder('state');
    const state = await openState(folder);
    const ids = Array.from({ length: 500 }, (_, n) => `m${n}`);
    expect(await Promise.all(ids.map((id) => state.change(put(id))))).toEqual(ids);
    expect(state.generation).toBeLessThan(10);
    expect(idsOnDisk(folder)).toEqual(ids);
    await state.close();
    const again = await openState(folder);
    expect([...again.machines.keys()]).toEqual(ids);
    expect([again.generation, again.installId]).toEqual([state.generation, state.installId]);
  });

  test('of any of many documents is written so that file and memory have exactly the same documents', async () => {
    const folder = temporaryFolder('state');
    const state = await openState(folder);
    // More documents than one block of the file can have.
    const ids = Array.from({ length: 600 }, (_, n) => `m${n}`);
    const changes: ((draft: StateTransaction) => unknown)[] = [
      (draft) => ids.map((id) => put(id)(draft)),
      put('m599', 'renamed'),
      put('m0', 'renamed – “twice”'),
      put('m600'),
      (draft) => draft.remove('machines', 'm300'),
      (draft) => put('m299', 'renamed')(draft) && put('m301', 'renamed')(draft),
      (draft) => ids.map((id) => draft.remove('machines', id)),
      (draft) => draft.remove('machines', 'm600'),
      put('m1'),
    ];
    for (const change of changes) {
      await state.change(change);
      const { checksum, ...file } = JSON.parse(readFileSync(join(folder, 'state.json'), 'utf8'));
      expect(file.machines).toEqual([...state.machines.values()]);
      const text = JSON.stringify(file);
      expect(readFileSync(join(folder, 'state.json'), 'utf8')).toBe(
        `{"checksum":"${checksum}",${text.slice(1)}`,
      );
      const again = await openState(folder);
      expect([...again.machines]).toEqual([...state.machines]);
    }
  });

  test('leaves the previous generation beside the file, and no other file', async () => {
    const folder = await usedFolder();
    expect(readdirSync(folder).sort()).toEqual(['state.json', 'state.json.last']);
    await (await openState(folder)).close();
    expect([idsOnDisk(folder, 'state.json.last'), idsOnDisk(folder)]).toEqual([['m1'], ['m1', 'm2']]);
  });

  test('writes files that only their owner may read, whatever the umask', async () => {
    const umask = process.umask(0);
    onTestFinished(() => void process.umask(umask));
    const folder = await usedFolder();
    const modes = ['state.json', 'state.json.last'].map((name) => statSync(join(folder, name)).mode & 0o777);
    expect(modes).toEqual([0o600, 0o600]);
  });

  test('of a document named __proto__ survives restarts', async () => {
    const system = await startFarhand();
    const agent = await system.agent({ name: '__proto__', tags: '__proto__,constructor' });
    await agent.close();
    await system.broker.close();
    const { client } = await startFarhand({ dataDir: system.dataDir });
    expect(await client.machines.get({ machine_id: agent.machineId })).toMatchObject({
      name: '__proto__',
      tags: ['__proto__', 'constructor'],
    });
    expect((await client.machines.list({ tags: '__proto__' })).total).toBe(1);
  });

  test('that is running is committed before close resolves', async () => {
    const folder = temporaryFolder('state');
    const state = await openState(folder);
    const changes = Promise.all(['a', 'b'].map((id) => state.change(put(id))));
    await state.close();
    expect(idsOnDisk(folder)).toEqual(['a', 'b']);
    await changes;
  });
});

test('a broker makes its folder private, and every file in it', async () => {
  const umask = process.umask(0);
  onTestFinished(() => void process.umask(umask));
  const dataDir = temporaryFolder('broker');
  chmodSync(dataDir, 0o777);
  const system = await startFarhand({ dataDir });
  await system.agent();
  expect(statSync(dataDir).mode & 0o777).toBe(0o700);
  const files = readdirSync(dataDir);
  expect(files).toEqual(
    expect.arrayContaining(['authority.json', 'history.db', 'history.db-wal', 'lock.db']),
  );
  for (const name of files) expect([name, statSync(join(dataDir, name)).mode & 0o777]).toEqual([name, 0o600]);
});

test('half-written files of a killed broker are removed at the next start', async () => {
  const folder = await usedFolder();
  cpSync(join(folder, 'state.json'), join(folder, '.state.json-0123456789abcdef'));
  await openState(folder);
  expect(readdirSync(folder).sort()).toEqual(['state.json', 'state.json.last']);
});

interface EventEntry extends OutboxEntry {
  event: { id: string; type: string; timestamp: string; data: object };
  machine_id: null;
}

const eventEntry = (id: string): EventEntry => ({
  kind: 'event',
  event: { id, type: 'machine.registered', timestamp: new Date().toISOString(), data: {} },
  machine_id: null,
});

async function eventIds(client: Farhand): Promise<string[]> {
  const { items } = await client.events.list({ limit: 100 });
  return items.map(({ id }) => id);
}

/** Opens the state in a directory, without a history that takes entries from the outbox. */
async function withoutHistory(folder: string): Promise<State> {
  const state = await openState(folder);
  await state.drainTo(() => Promise.reject(new Error('the disk is full'))).catch(() => {});
  return state;
}

describe('the outbox', () => {
  test('stores entries that history could not write, and the change itself is safe', async () => {
    const folder = temporaryFolder('state');
    const state = await withoutHistory(folder);
    await state.change((draft) => draft.append({ kind: 'one' }));
    await state.change((draft) => draft.append({ kind: 'two' }));
    expect(onDisk(folder).outbox).toEqual([{ kind: 'one' }, { kind: 'two' }]);
    const received: OutboxEntry[][] = [];
    await state.drainTo(async (entries) => void received.push([...entries]));
    await state.change((draft) => draft.append({ kind: 'three' }));
    expect(received).toEqual([[{ kind: 'one' }, { kind: 'two' }], [{ kind: 'three' }]]);
    expect(onDisk(folder).outbox).toEqual([{ kind: 'three' }]);
  });

  test('also stores them if history has written earlier entries', async () => {
    const folder = temporaryFolder('state');
    const state = await openState(folder);
    const received: string[] = [];
    let full = false;
    await state.drainTo(async (entries) => {
      if (full) throw new Error('the disk is full');
      received.push(...entries.map(({ kind }) => kind));
    });
    await state.change((draft) => draft.append({ kind: 'one' }));
    full = true;
    await state.change((draft) => draft.append({ kind: 'two' }));
    full = false;
    await state.change((draft) => draft.append({ kind: 'three' }));
    expect(received).toEqual(['one', 'two', 'three']);
  });

  test('is written to history before its change resolves, and removed with the next write', async () => {
    const folder = temporaryFolder('state');
    const state = await openState(folder);
    const received: string[] = [];
    await state.drainTo(async (entries) => {
      // As slow as a history that commits in the next turn of the event loop.
      await new Promise((resolve) => setImmediate(resolve));
      received.push(...entries.map(({ kind }) => kind));
    });
    await state.change((draft) => draft.append({ kind: 'one' }));
    expect(received).toEqual(['one']);
    await Promise.all(
      ['two', 'three', 'four'].map((kind) => state.change((draft) => draft.append({ kind }))),
    );
    expect(received).toEqual(['one', 'two', 'three', 'four']);
    await state.change(put('a'));
    expect(received).toHaveLength(4);
    expect(onDisk(folder).outbox).toEqual([]);
  });

  test('of a broker that died before history had it is applied at the next start, once', async () => {
    const first = await startFarhand();
    await first.broker.close();
    const state = await withoutHistory(first.dataDir);
    await state.change((draft) => {
      put('m1')(draft);
      draft.append(eventEntry('evt_one'));
    });
    await state.change((draft) => draft.append(eventEntry('evt_two')));
    await state.close();
    for (const _start of ['first', 'second']) {
      const system = await startFarhand({ dataDir: first.dataDir });
      expect((await eventIds(system.client)).sort()).toEqual(['evt_one', 'evt_two']);
      expect((await system.client.machines.list()).total).toBe(1);
      await system.broker.close();
    }
  });

  test('of a change made after a restored generation is written to history', async () => {
    const folder = temporaryFolder('state');
    const joins = async (id: string): Promise<unknown[]> => {
      const state = await openState(folder);
      const history = openHistory(join(folder, 'history.db'), state.installId, quiet);
      await Events.open(history, 72 * 3_600_000);
      await state.drainTo((entries) => history.applyOutbox(entries));
      await state.change((draft) => draft.append(eventEntry(id)));
      await state.close();
      const ids = await history.all('SELECT id FROM events ORDER BY rowid');
      await history.close();
      return ids.map((row) => row.id);
    };
    await (await openState(folder)).close();
    expect(await joins('evt_lost')).toEqual(['evt_lost']);
    truncateSync(join(folder, 'state.json'));
    execFileSync('sh', ['-ec', commandIn(await refusal(folder))]);
    expect(await joins('evt_again')).toEqual(['evt_lost', 'evt_again']);
  });

  test('of a broker that died after history had it is not applied twice', async () => {
    const system = await startFarhand();
    await system.agent();
    const file = join(system.dataDir, 'state.json');
    const asItDied = readFileSync(file);
    expect(onDisk(system.dataDir).outbox).not.toEqual([]);
    const before = await eventIds(system.client);
    await system.broker.close();
    writeFileSync(file, asItDied);
    const { client } = await startFarhand({ dataDir: system.dataDir });
    expect((await eventIds(client)).filter((id) => before.includes(id))).toEqual(before);
    expect((await client.events.list({ type: 'machine.registered' })).total).toBe(1);
  });

  test('brings back no event that history deleted for its age', async () => {
    const system = await startFarhand();
    await system.agent();
    await system.broker.close();
    const history = new DatabaseSync(join(system.dataDir, 'history.db'));
    history.exec('DELETE FROM events');
    history.close();
    moveClock(73 * 3_600_000);
    const { client } = await startFarhand({ dataDir: system.dataDir });
    expect((await client.events.list({ type: 'machine.registered' })).total).toBe(0);
  });
});

/** Moves the wall clock until the end of the test. */
function moveClock(ms: number): void {
  setClock({
    now: () => Date.now() + ms,
    monotonic: () => performance.now(),
    after(delay, run, hold = false) {
      const timer = setTimeout(run, delay);
      if (!hold) timer.unref();
      return () => clearTimeout(timer);
    },
  });
  onTestFinished(() => setClock());
}

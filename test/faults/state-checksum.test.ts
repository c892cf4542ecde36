// The checksum of state.json: the broker refuses a file with a flipped bit, and accepts a file of 0.1.0 without a
// checksum once.
import { execFileSync } from 'node:child_process';
import { closeSync, openSync, readFileSync, rmSync, writeFileSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, onTestFinished, test } from 'vitest';
import { type Machine, openState } from '../../broker/state/index.ts';
import type { JoinTokenId, MachineId } from '../../shared/api/shared-schemas.ts';
import { StartError } from '../../shared/errors.ts';
import { temporaryFolder } from '../start-farhand.ts';

const machine = (id: string): Machine => ({
  id: id as MachineId,
  name: `${id} ü 😀 \ufffd`,
  tags: [],
  public_key: '',
  join_token_id: 'join_x' as JoinTokenId,
  created_at: '2026-01-01T00:00:00.000Z',
});

const add = async (folder: string, id: string): Promise<void> => {
  const state = await openState(folder);
  await state.change((draft) => draft.put('machines', machine(id)));
  await state.close();
};

/** Makes the data directory of a broker that has committed two changes: m1, then m2. */
async function usedFolder(): Promise<string> {
  const folder = temporaryFolder('state');
  await add(folder, 'm1');
  await add(folder, 'm2');
  return folder;
}

const fileIn = (folder: string): string => join(folder, 'state.json');
const textIn = (folder: string): string => readFileSync(fileIn(folder), 'utf8');

/** Edits state.json as a user would. */
function edit(folder: string, change: (state: Record<string, unknown>) => object): void {
  writeFileSync(fileIn(folder), JSON.stringify(change(JSON.parse(textIn(folder))), null, 2));
}

/** Converts the files to the format of 0.1.0. */
function asOf010(folder: string): void {
  for (const name of ['state.json', 'state.json.last']) {
    const { checksum: _, ...rest } = JSON.parse(readFileSync(join(folder, name), 'utf8'));
    writeFileSync(join(folder, name), JSON.stringify({ ...rest, version: 1 }));
  }
}

async function refusal(folder: string): Promise<string> {
  const before = readFileSync(fileIn(folder));
  const error = await openState(folder).then(
    () => undefined,
    (reason: unknown) => reason,
  );
  expect(error).toBeInstanceOf(StartError);
  expect(readFileSync(fileIn(folder))).toEqual(before);
  return (error as StartError).message;
}

function recover(message: string): void {
  const command = /to go back to the previous version .*: (mv .*)$/.exec(message)?.[1];
  if (!command) throw new Error(`no command in: ${message}`);
  execFileSync('sh', ['-ec', command]);
}

const idsOf = async (folder: string): Promise<string[]> => [...(await openState(folder)).machines.keys()];

describe('a start is refused', () => {
  test('for any flipped bit of state.json', async () => {
    const folder = temporaryFolder('state');
    await add(folder, 'm1');
    const whole = readFileSync(fileIn(folder));
    const file = openSync(fileIn(folder), 'r+');
    onTestFinished(() => closeSync(file));
    const accepted: number[] = [];
    for (let bit = 0; bit < whole.length * 8; bit += 1) {
      const at = bit >> 3;
      const byte = whole.subarray(at, at + 1);
      writeSync(file, Buffer.of(byte.readUInt8() ^ (1 << (bit & 7))), 0, 1, at);
      await openState(folder).then(
        () => accepted.push(bit),
        (error: unknown) => {
          if (!(error instanceof StartError)) throw error;
        },
      );
      writeSync(file, byte, 0, 1, at);
    }
    expect(accepted).toEqual([]);
    expect(await idsOf(folder)).toEqual(['m1']);
  });

  test.each<[string, (folder: string) => void]>([
    ['wrong', (folder) => writeFileSync(fileIn(folder), textIn(folder).replace('"m2"', '"m3"'))],
    ['missing', (folder) => edit(folder, ({ checksum: _, ...rest }) => rest)],
    [
      'missing, as in a second file of 0.1.0',
      (folder) => edit(folder, ({ checksum: _, ...rest }) => ({ ...rest, version: 1 })),
    ],
    ['not where it was', (folder) => edit(folder, ({ checksum, ...rest }) => ({ ...rest, checksum }))],
  ])('when the checksum is %s, with the command that recovers the file', async (_what, damage) => {
    const folder = await usedFolder();
    damage(folder);
    const message = await refusal(folder);
    expect(message).toContain(`if you edited it, run farhand broker state accept --data-dir ${folder}`);
    recover(message);
    expect(await idsOf(folder)).toEqual(['m1']);
  });

  test('without a recovery command if the previous generation is damaged, too', async () => {
    const folder = await usedFolder();
    for (const name of ['state.json', 'state.json.last']) {
      const file = join(folder, name);
      writeFileSync(file, readFileSync(file, 'utf8').replace('"m1"', '"m3"'));
    }
    expect(await refusal(folder)).toMatch(/restore it from a backup$/);
    rmSync(fileIn(folder));
    await expect(openState(folder)).rejects.toThrow('put state.json from a backup into');
  });
});

describe('a state of 0.1.0', () => {
  test('is accepted once without a checksum, and has one before anything is changed', async () => {
    const folder = await usedFolder();
    asOf010(folder);
    const old = textIn(folder);
    expect(await idsOf(folder)).toEqual(['m1', 'm2']);
    expect(textIn(folder)).toMatch(/^\{"checksum":"[0-9a-f]{8}","version":2,/);
    expect(await idsOf(folder)).toEqual(['m1', 'm2']);
    writeFileSync(fileIn(folder), old);
    recover(await refusal(folder));
    expect(await idsOf(folder)).toEqual(['m1', 'm2']);
  });

  test('is accepted again if a start was killed before it had written both generations', async () => {
    const folder = await usedFolder();
    asOf010(folder);
    const old = textIn(folder);
    await (await openState(folder)).close();
    writeFileSync(join(folder, 'state.json.last'), old);
    expect(await idsOf(folder)).toEqual(['m1', 'm2']);
    writeFileSync(fileIn(folder), textIn(folder).replace('"m2"', '"m3"'));
    recover(await refusal(folder));
    expect(await idsOf(folder)).toEqual(['m1', 'm2']);
  });
});

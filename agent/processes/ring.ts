// What a crashed agent of 0.1.0 has left beside its journal: its spawners wrote "accepted" themselves, into rings of
// fixed places, and the journal had it only later. Each proves that its id may have run.
import { readdir, readFile, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { errnoOf, fromErrno } from '../../shared/errors.ts';
import { type Line, parseLines } from './journal.ts';

/** Accepted ids of which the journal has nothing; no spawner may be left that writes. */
export async function readRings(directory: string, journal: readonly Line[]): Promise<Line[]> {
  // Places in a ring are overwritten late: what the journal has is newer.
  const journalled = new Set(journal.filter(({ t }) => t !== 'started' && t !== 'end').map(({ id }) => id));
  const texts = await Promise.all((await ringsIn(directory)).map(read));
  const lines = texts.flatMap((text) => parseLines(text.split('\n')));
  return lines.filter(({ t, id }) => t === 'accepted' && !journalled.has(id));
}

/** Removes the rings, once the journal has what they hold. */
export async function removeRings(directory: string): Promise<void> {
  for (const path of await ringsIn(directory)) await rm(path, { force: true, recursive: true });
}

async function ringsIn(directory: string): Promise<string[]> {
  const names = await readdir(directory);
  return names.filter((name) => name.startsWith('promises-')).map((name) => join(directory, name));
}

function read(path: string): Promise<string> {
  return readFile(path, 'utf8').catch((error: unknown) => {
    // No spawner has written this.
    if (errnoOf(error) === 'EISDIR') return '';
    throw fromErrno(error, path);
  });
}

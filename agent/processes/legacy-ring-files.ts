// Reads the ring files that a crashed agent of version 0.1.0 left beside its journal.
// In that version the spawners wrote each "accepted" line into a ring file, and the journal got the line
// later. A line in a ring proves that the command of this id may have run.
import { readdir, readFile, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { errnoOf, fromErrno } from '../../shared/errors.ts';
import { type Line, parseLines } from './journal.ts';

/** The "accepted" lines whose ids the journal lacks. Call it only after all old spawners are dead. */
export async function readRings(directory: string, journal: readonly Line[]): Promise<Line[]> {
  // A ring may still hold old lines of an id, so a line in the journal is the newer one.
  const journalled = new Set(journal.filter(({ t }) => t !== 'started' && t !== 'end').map(({ id }) => id));
  const texts = await Promise.all((await ringsIn(directory)).map(read));
  const lines = texts.flatMap((text) => parseLines(text.split('\n')));
  return lines.filter(({ t, id }) => t === 'accepted' && !journalled.has(id));
}

/** Removes the ring files. Call it only after their lines are in the journal. */
export async function removeRings(directory: string): Promise<void> {
  for (const path of await ringsIn(directory)) await rm(path, { force: true, recursive: true });
}

async function ringsIn(directory: string): Promise<string[]> {
  const names = await readdir(directory);
  return names.filter((name) => name.startsWith('promises-')).map((name) => join(directory, name));
}

function read(path: string): Promise<string> {
  return readFile(path, 'utf8').catch((error: unknown) => {
    // A directory of this name was not written by a spawner.
    if (errnoOf(error) === 'EISDIR') return '';
    throw fromErrno(error, path);
  });
}

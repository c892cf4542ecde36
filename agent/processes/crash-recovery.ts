// Crash recovery: kills the processes that an earlier run of the agent left, and stores their outcome as lost. Their
// output so far stays readable.
import { mkdir, readdir, readFile, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { now } from '../../shared/clock.ts';
import { ignoring } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { type OutputLog, openOutput } from '../../shared/output-log.ts';
import { bootId } from '../boot-id.ts';
import { killTree, Tree } from './kill-tree.ts';
import {
  type Exit,
  Journal,
  type JournalEntry,
  type Line,
  parseLines,
  readJournal,
} from './process-journal.ts';
import type { Limits, Parts } from './running-process.ts';
import { marksOf } from './spawner/spawner-pool.ts';

/** A command that was started before the agent's last restart, and its output. */
export interface Recovered {
  entry: JournalEntry;
  stdout: OutputLog;
  stderr: OutputLog;
}

export function outputNames(id: string): { stdout: string; stderr: string } {
  return { stdout: `${id}.stdout`, stderr: `${id}.stderr` };
}

/**
 * Returns an exit for a process whose real exit is unknown. `outcome`: LOST if the agent had accepted the process,
 * EXPIRED if the agent has no record of the id.
 */
export function unseen(outcome: 'PROCESS_OUTCOME_LOST' | 'PROCESS_OUTCOME_EXPIRED', reason: string): Exit {
  const times = { started_at_ms: 0, finished_at_ms: now() };
  return { outcome, reason, exit_code: 0, signal: '', ...times, stdout_bytes: 0, stderr_bytes: 0 };
}

/** Kills the spawners (which start commands) that an earlier run of the agent left. Then opens the journal. */
export async function recoverJournal(directory: string, limits: Limits, log: Logger): Promise<Journal> {
  const stored = await readJournal(directory, log);
  await killSpawners(stored.id, limits.killForMs, log);
  const lines = [...stored.lines, ...(await readPromisesFiles(directory, stored.lines))];
  const journal = await Journal.open(directory, { ...stored, lines }, limits.seenMs, log);
  await removePromisesFiles(directory);
  return journal;
}

/**
 * Kills all processes for which the journal has no exit, and records their outcome as lost. Returns all commands of the
 * journal by id.
 */
export async function recover(parts: Parts, outputs: string, pipes: string): Promise<Map<string, Recovered>> {
  const { journal, cgroups } = parts;
  await killLeftovers(parts, pipes);
  await cgroups?.removeEmpty();
  await mkdir(outputs, { recursive: true, mode: 0o700 });
  await removeUnknown(journal, outputs);
  const commands = new Map<string, Recovered>();
  for (const [id, entry] of journal.entries) {
    if (!entry.terminal) commands.set(id, await reopen(id, entry, parts, outputs));
    // A terminal is not recovered: its output was only in memory.
    else if (!entry.exit) lose(id, entry, journal);
  }
  return commands;
}

/**
 * Kills the spawners of an earlier run of the agent and all their processes. A surviving spawner could start a command
 * after the recovery.
 */
async function killSpawners(journalId: string, killForMs: number, log: Logger): Promise<void> {
  // That run may have been version 0.1.0, which had four spawners of each of the types `spawner` and `forking-spawner`.
  const numbers = [0, 1, 2, 3].map((nth) => `:${journalId}:${nth}`);
  const olderMarks = numbers.flatMap((number) => [`spawner${number}`, `forking-spawner${number}`]);
  const tree = new Tree({ marks: [...marksOf(journalId), ...olderMarks] });
  const left = await tree.members();
  if (left.length === 0) return;
  // SIGKILL also ends a spawner that SIGSTOP has stopped. A spawner that waits for a disk ends only after that wait. It
  // runs no more code of its own, so it starts no further command.
  const survivors = await killTree(tree, AbortSignal.abort(), killForMs, 'SIGKILL');
  const pids = left.map(({ pid }) => pid);
  log.warn(
    { pids, survivors },
    'killed the spawners (which start commands) that an earlier run of the agent left, and the processes they had started',
  );
}

async function killLeftovers({ journal, cgroups, limits, log }: Parts, pipes: string): Promise<void> {
  const entries = [...journal.entries].filter(([, { exit }]) => !exit);
  const marks = entries.map(([id]) => id);
  if (marks.length === 0) return;
  // A process whose stdout or stderr is a pipe in this directory belongs to a command of the earlier run.
  const links = (await readdir(pipes).catch(() => [])).map((name) => join(pipes, name));
  // After a reboot, the pids belong to other programs.
  const leaders = entries
    .map(([, { started }]) => started)
    .filter((one) => one !== undefined)
    .filter(({ boot = bootId() }) => boot === bootId());
  const paths = entries.flatMap(([, { cgroup }]) => (cgroup && cgroups ? cgroups.pathOf(cgroup) : []));
  const tree = new Tree({ marks, links, leaders, cgroups: paths });
  if (await tree.isGone()) return;
  const survivors = await killTree(tree, AbortSignal.abort(), limits.killForMs);
  log.warn(
    { ids: marks, survivors },
    'the agent has killed commands and terminals that were left running when it last stopped; they count as lost',
  );
}

async function reopen(
  id: string,
  entry: JournalEntry,
  { journal, limits }: Parts,
  outputs: string,
): Promise<Recovered> {
  const names = outputNames(id);
  const stdout = await openOutput(join(outputs, names.stdout), limits);
  const stderr = await openOutput(join(outputs, names.stderr), limits);
  // After a power cut an output file may be shorter than the journal says. Readers see the missing bytes as a gap.
  await stdout.skip(entry.exit?.stdout_bytes ?? 0);
  await stderr.skip(entry.exit?.stderr_bytes ?? 0);
  if (!entry.exit) lose(id, entry, journal, { stdout_bytes: stdout.end, stderr_bytes: stderr.end });
  return { entry, stdout, stderr };
}

function lose(id: string, { started }: JournalEntry, journal: Journal, bytes: Partial<Exit> = {}): void {
  const lost = unseen('PROCESS_OUTCOME_LOST', 'agent_restarted');
  journal.ended(id, { ...lost, started_at_ms: started?.at ?? 0, ...bytes });
}

/**
 * Removes the output files of commands that are not in the journal. Such files remain if the agent crashes while it
 * removes a command.
 */
async function removeUnknown(journal: Journal, outputs: string): Promise<void> {
  const known = new Set([...journal.entries.keys()].flatMap((id) => Object.values(outputNames(id))));
  for (const name of await readdir(outputs)) {
    if (!known.has(name)) await rm(join(outputs, name), { recursive: true, force: true });
  }
}

// Version 0.1.0 recorded an accepted command first in a file promises-N, and later in the journal. After a crash in
// between, only promises-N names the command.

/**
 * Returns the "accepted" lines that only the files promises-N have. Call this after the old spawners, which write these
 * files, have been killed.
 */
async function readPromisesFiles(directory: string, journal: readonly Line[]): Promise<Line[]> {
  // Commands in the journal are left out: for them the journal has a newer line than promises-N.
  const journalled = new Set(journal.filter(({ t }) => t !== 'started' && t !== 'end').map(({ id }) => id));
  const paths = await promisesFilesIn(directory);
  const texts = await Promise.all(paths.map((path) => readFile(path, 'utf8').catch(ignoring('EISDIR'))));
  const lines = texts.flatMap((text = '') => parseLines(text.split('\n')));
  return lines.filter(({ t, id }) => t === 'accepted' && !journalled.has(id));
}

/** Removes the files promises-N of version 0.1.0. Call this after the journal has recorded their commands. */
async function removePromisesFiles(directory: string): Promise<void> {
  for (const path of await promisesFilesIn(directory)) await rm(path, { force: true, recursive: true });
}

async function promisesFilesIn(directory: string): Promise<string[]> {
  const names = await readdir(directory);
  return names.filter((name) => name.startsWith('promises-')).map((name) => join(directory, name));
}

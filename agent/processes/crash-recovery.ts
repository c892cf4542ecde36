// Crash recovery: kills the processes that an earlier agent left running and stores their outcome as lost.
// Their output so far stays readable.
import { mkdir, readdir, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import { type OutputLog, openOutput } from '../../shared/output-log.ts';
import type { Cgroups } from './cgroup.ts';
import type { Exit, Journal, JournalEntry } from './journal.ts';
import { killTree, Tree } from './kill-tree.ts';
import { marksOf } from './spawner/index.ts';

export interface Left {
  journal: Journal;
  /** The directory of all output logs. */
  outputs: string;
  /** The directory of all pipes. */
  pipes: string;
  cgroups: Cgroups | undefined;
  limits: { windowBytes: number; killForMs: number };
  log: Logger;
}

/** A command of an earlier agent, and its output. */
export interface Recovered {
  entry: JournalEntry;
  stdout: OutputLog;
  stderr: OutputLog;
}

/** File names of a command's output logs. */
export function outputNames(id: string): { stdout: string; stderr: string } {
  return { stdout: `${id}.stdout`, stderr: `${id}.stderr` };
}

/** The exit of a process whose end the agent did not observe. */
export function unseen(outcome: 'PROCESS_OUTCOME_LOST' | 'PROCESS_OUTCOME_EXPIRED', reason: string): Exit {
  const times = { started_at_ms: 0, finished_at_ms: now() };
  return { outcome, reason, exit_code: 0, signal: '', ...times, stdout_bytes: 0, stderr_bytes: 0 };
}

/**
 * Kills every process without an exit in the journal and records it as lost.
 * Returns the commands by id; terminals need only their journal entries.
 */
export async function recover(left: Left): Promise<Map<string, Recovered>> {
  const { journal, outputs, cgroups } = left;
  await killLeftovers(left);
  await cgroups?.removeEmpty();
  await mkdir(outputs, { recursive: true, mode: 0o700 });
  await removeUnknown(journal, outputs);
  const commands = new Map<string, Recovered>();
  for (const [id, entry] of journal.entries) {
    if (!entry.terminal) commands.set(id, await reopen(id, entry, left));
    else if (!entry.exit) lose(id, entry, journal);
  }
  return commands;
}

/**
 * Kills the spawners of an earlier agent with everything they run.
 * A command that the earlier agent requested must not start after the recovery.
 */
export async function killSpawners(journalId: string, killForMs: number, log: Logger): Promise<void> {
  // Agents of version 0.1.0 had four spawners of each of two types.
  const older = [0, 1, 2, 3].map((nth) => `:${journalId}:${nth}`);
  const marks = older.flatMap((mark) => [`spawner${mark}`, `forking-spawner${mark}`]);
  const tree = new Tree({ marks: [...marksOf(journalId), ...marks] });
  const left = await tree.members();
  if (left.length === 0) return;
  // SIGKILL also ends a spawner that is stopped. A spawner that waits for a disk runs no more code after it.
  const survivors = await killTree(tree, AbortSignal.abort(), killForMs, 'SIGKILL');
  const pids = left.map(({ pid }) => pid);
  log.warn({ pids, survivors }, 'killed spawners of an earlier agent, with what they ran');
}

async function killLeftovers({ journal, pipes, cgroups, limits, log }: Left): Promise<void> {
  const entries = [...journal.entries].filter(([, { exit }]) => !exit);
  const marks = entries.map(([id]) => id);
  if (marks.length === 0) return;
  // A pipe stays in its directory as long as its command runs.
  const links = (await readdir(pipes).catch(() => [])).map((name) => join(pipes, name));
  const leaders = entries.map(([, { started }]) => started).filter((one) => one !== undefined);
  const tree = new Tree({ marks, links, leaders, cgroups });
  if ((await tree.members()).length === 0) return;
  const survivors = await killTree(tree, AbortSignal.abort(), limits.killForMs);
  log.warn({ ids: marks, survivors }, 'killed what an earlier agent had left running');
}

async function reopen(
  id: string,
  entry: JournalEntry,
  { journal, outputs, limits }: Left,
): Promise<Recovered> {
  const names = outputNames(id);
  const stdout = await openOutput(join(outputs, names.stdout), limits);
  const stderr = await openOutput(join(outputs, names.stderr), limits);
  // After a power cut a file may be shorter than the length in the journal; the rest becomes a gap at the
  // end.
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
 * Removes the output of commands that are no longer in the journal, such as those removed just before a
 * crash.
 */
async function removeUnknown(journal: Journal, outputs: string): Promise<void> {
  const known = new Set([...journal.entries.keys()].flatMap((id) => Object.values(outputNames(id))));
  for (const name of await readdir(outputs)) {
    if (!known.has(name)) await rm(join(outputs, name), { recursive: true, force: true });
  }
}

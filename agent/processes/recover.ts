// What an earlier agent left: its processes are killed, their outcome is unknown, their output is kept.
import { mkdir, readdir, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import { openOutput, Wake } from '../../shared/output.ts';
import type { Followed } from './follow.ts';
import type { Entry, Exit, Journal } from './journal.ts';
import { killTree, Tree } from './tree.ts';

interface Left {
  journal: Journal;
  /** The directory of all output logs. */
  outputs: string;
  /** The directory of all pipes. */
  pipes: string;
  limits: { windowBytes: number; killForMs: number };
  log: Logger;
}

/** Names of the logs of a process below the directory of outputs. */
export function outputNames(id: string): { stdout: string; stderr: string } {
  return { stdout: `${id}.stdout`, stderr: `${id}.stderr` };
}

/** An exit of a process that was not seen to end. */
export function unseen(outcome: 'PROCESS_OUTCOME_LOST' | 'PROCESS_OUTCOME_EXPIRED', reason: string): Exit {
  const times = { started_at_ms: 0, finished_at_ms: now() };
  return { outcome, reason, exit_code: 0, signal: '', ...times, stdout_bytes: 0, stderr_bytes: 0 };
}

/** All commands that the journal keeps, ended; of terminals only how they ended is left, and that is in the journal. */
export async function recover(left: Left): Promise<Map<string, Followed>> {
  const { journal, outputs } = left;
  await killLeftovers(left);
  await mkdir(outputs, { recursive: true, mode: 0o700 });
  await removeStrangers(journal, outputs);
  const kept = new Map<string, Followed>();
  for (const [id, entry] of journal.entries) {
    if (!entry.terminal) kept.set(id, await reopen(id, entry, left));
    else if (!entry.exit) lose(id, entry, journal);
  }
  return kept;
}

/** With what they ran. What an earlier agent had asked them for and they had not begun must not follow the recovery. */
export async function killSpawners(marks: string[], killForMs: number, log: Logger): Promise<void> {
  const tree = new Tree(marks, []);
  const left = await tree.members();
  if (left.length === 0) return;
  // One that is stopped or waits for a disk does nothing more after this.
  const survivors = await killTree(tree, AbortSignal.abort(), killForMs, 'SIGKILL');
  log.warn(
    { pids: left.map(({ pid }) => pid), survivors },
    'killed spawners of an earlier agent, with what they ran',
  );
}

async function killLeftovers({ journal, pipes, limits, log }: Left): Promise<void> {
  const entries = [...journal.entries].filter(([, { exit }]) => !exit);
  const open = entries.map(([id]) => id);
  if (open.length === 0) return;
  // A pipe that still has its name was in use: the name goes when a command leaves it to the background.
  const links = (await readdir(pipes).catch(() => [])).map((name) => join(pipes, name));
  const leaders = entries.map(([, { started }]) => started).filter((one) => one !== undefined);
  const tree = new Tree(open, links, leaders);
  if ((await tree.members()).length === 0) return;
  const survivors = await killTree(tree, AbortSignal.abort(), limits.killForMs);
  log.warn({ ids: open, survivors }, 'killed what an earlier agent had left running');
}

async function reopen(id: string, entry: Entry, { journal, outputs, limits }: Left): Promise<Followed> {
  const changed = new Wake();
  const names = outputNames(id);
  const options = { windowBytes: limits.windowBytes, changed };
  const stdout = await openOutput(join(outputs, names.stdout), options);
  const stderr = await openOutput(join(outputs, names.stderr), options);
  // After a power cut files may be shorter than what was told: that is a gap at the end.
  await stdout.skip(entry.exit?.stdout_bytes ?? 0);
  await stderr.skip(entry.exit?.stderr_bytes ?? 0);
  const { started } = entry;
  if (!entry.exit) lose(id, entry, journal, { stdout_bytes: stdout.end, stderr_bytes: stderr.end });
  return { changed, stdout, stderr, ...(started && { started }), ...(entry.exit && { exit: entry.exit }) };
}

function lose(id: string, { started }: Entry, journal: Journal, bytes: Partial<Exit> = {}): void {
  const lost = unseen('PROCESS_OUTCOME_LOST', 'agent_restarted');
  journal.ended(id, { ...lost, started_at_ms: started?.at ?? 0, ...bytes });
}

/** Output of processes that were forgotten just before a crash. */
async function removeStrangers(journal: Journal, outputs: string): Promise<void> {
  const known = new Set([...journal.entries.keys()].flatMap((id) => Object.values(outputNames(id))));
  for (const name of await readdir(outputs)) {
    if (!known.has(name)) await rm(join(outputs, name), { recursive: true, force: true });
  }
}

// Lists the processes of this machine from /proc. Calls at the same time share one scan.
import { readFileSync } from 'node:fs';
import { readdir, readFile, readlink } from 'node:fs/promises';
import { marker } from './launch-plan.ts';

/** Identifies one process. The pid alone does not, because the kernel reuses pids. */
export interface Leader {
  pid: number;
  /** Start time in clock ticks since boot, field 22 of /proc/PID/stat (proc(5)). */
  start: string;
}

export interface Process extends Leader {
  parent: number;
  group: number;
  session: number;
  /** The foreground process group of its terminal; -1 without a terminal. */
  foreground: number;
  alive: boolean;
}

/** A process with the facts that show which command it belongs to. */
export interface Seen extends Process {
  /** Value of the marker variable in its environment; undefined if absent or unreadable. */
  mark: string | undefined;
  /** Targets of its standard output and error, as /proc/PID/fd lists them. */
  links: readonly string[];
}

let next: Promise<readonly Seen[]> | undefined;
let last: Promise<unknown> = Promise.resolve();

/** All processes except this one and init. The scan begins after this call. */
export function census(): Promise<readonly Seen[]> {
  // A running scan is not reused: it may already have passed the process that the caller looks for.
  next ??= last.then(() => {
    next = undefined;
    const taken = take();
    last = taken.catch(() => {});
    return taken;
  });
  return next;
}

/** The state of one process now. */
export function statNow(pid: number): Process | undefined {
  try {
    return parseStat(readFileSync(`/proc/${pid}/stat`, 'latin1'));
  } catch {
    return undefined;
  }
}

async function take(): Promise<Seen[]> {
  const pids = (await readdir('/proc')).filter((name) => /^\d+$/.test(name)).map(Number);
  const others = pids.filter((pid) => pid > 1 && pid !== process.pid);
  const seen = await inChunks(others, lookAt);
  return seen.filter((one) => one !== undefined);
}

async function lookAt(pid: number): Promise<Seen | undefined> {
  const found = parseStat(await readFile(`/proc/${pid}/stat`, 'latin1').catch(() => ''));
  if (!found) return undefined;
  if (!found.alive) return { ...found, mark: undefined, links: [] };
  const links = [1, 2].map((fd) => readlink(`/proc/${pid}/fd/${fd}`).catch(() => ''));
  return { ...found, mark: await markOf(pid), links: await Promise.all(links) };
}

/**
 * Parses /proc/PID/stat (proc(5)). The program name may contain brackets, so fields are counted after the
 * last `)`.
 */
function parseStat(text: string): Process | undefined {
  const fields = text.slice(text.lastIndexOf(')') + 2).split(' ');
  const [state = '', parent, group, session, , foreground] = fields;
  const start = fields[19];
  if (!start) return undefined;
  // The process is alive if its main thread is a zombie and other threads run.
  const alive = !/[ZXx]/.test(state) || Number(fields[17]) > 1;
  const pid = Number.parseInt(text, 10);
  const ids = { parent: Number(parent), group: Number(group), session: Number(session) };
  return { pid, ...ids, foreground: Number(foreground), start, alive };
}

async function markOf(pid: number): Promise<string | undefined> {
  const text = await readFile(`/proc/${pid}/environ`, 'latin1').catch(() => '');
  const key = `\0${marker}=`;
  const at = `\0${text}`.indexOf(key);
  return at < 0 ? undefined : text.slice(at + key.length - 1, text.indexOf('\0', at + key.length - 1));
}

/** Runs 16 at a time, so that a scan of thousands does not fill the thread pool. */
async function inChunks<T, R>(items: readonly T[], run: (item: T) => Promise<R>): Promise<R[]> {
  const results: R[] = [];
  for (let at = 0; at < items.length; at += 16) {
    results.push(...(await Promise.all(items.slice(at, at + 16).map(run))));
  }
  return results;
}

// Removes ended orphans. In a container, the agent may be the first process (pid 1). The kernel then makes it the
// parent of all processes that commands leave behind, and keeps each of them as a zombie until its parent has waited
// for it.
import { readdirSync } from 'node:fs';
import { every } from '../../shared/clock.ts';
import { type Process, statNow } from './proc-pid-stat.ts';
import { loadPosixSpawn } from './spawner/posix-spawn.ts';

/** Looks for ended orphans every `ms` milliseconds if the agent has pid 1. Returns a function that stops this. */
export function removeOrphans(ms: number): () => void {
  const posix = process.pid === 1 ? loadPosixSpawn() : undefined;
  if (!posix) return () => {};
  let earlier = new Set<string>();
  return every(ms, () => {
    const ended = endedChildren();
    // Node waits for its own children at once, so a zombie that two scans have found is an orphan.
    for (const { pid, start } of ended) if (earlier.has(`${pid} ${start}`)) posix.wait(pid);
    earlier = new Set(ended.map(({ pid, start }) => `${pid} ${start}`));
  });
}

/** Returns the zombies whose parent is this process. Returns none if /proc cannot be read for lack of descriptors. */
function endedChildren(): Process[] {
  try {
    const all = readdirSync('/proc').flatMap((name) => statNow(Number(name)) ?? []);
    return all.filter(({ parent, alive }) => parent === process.pid && !alive);
  } catch {
    return [];
  }
}

// Pages of Node's own file that only a start has used: most of what a resting agent seems to need.
import type { Koffi } from './libc.ts';

type Advise = (start: number, length: number, advice: number) => number;

/**
 * Takes Node's own file out of this process's memory, where it can: what is used again is mapped again from the page
 * cache, in microseconds, and the kernel is free to use the rest. `addon`: the name of koffi. `from`: the file for which
 * that is resolved. The spawner gets it as text: nothing outside the function exists there.
 */
export function unmapProgram(addon: string, from: string): void {
  const { readFileSync, realpathSync } = process.getBuiltinModule('node:fs');
  const { createRequire } = process.getBuiltinModule('node:module');
  // madvise(2): MADV_DONTNEED.
  const dontNeed = 4;
  try {
    // An addon has no types here.
    const koffi = createRequire(from)(addon) as Koffi<Advise>;
    const madvise = koffi.load(null).func('int madvise(uintptr_t start, size_t length, int advice)');
    const program = realpathSync(process.execPath);
    const smaps = readFileSync('/proc/self/smaps', 'latin1');
    // proc_pid_smaps(5). Only what is as it is on disk: what was written there would be lost.
    for (const mapping of smaps.split(/^(?=[0-9a-f]+-[0-9a-f]+ )/m)) {
      const [, from = '', to = '', mode = '', file] =
        /^(\w+)-(\w+) (\S+) \S+ \S+ \d+ *(.*)$/m.exec(mapping) ?? [];
      if (file !== program || mode.includes('w') || !/^Anonymous: +0 kB$/m.test(mapping)) continue;
      const start = Number.parseInt(from, 16);
      madvise(start, Number.parseInt(to, 16) - start, dontNeed);
    }
  } catch {
    // No addon, or no such file in /proc.
  }
}

// Pages of Node's own file that only a start has used: most of what a resting agent seems to need.
import type { Koffi } from './libc.ts';

type Advise = (start: number, length: number, advice: number) => number;

/**
 * What takes Node's own file out of this process's memory, where that can be: what is used again is mapped again from
 * the page cache, in microseconds, and the kernel is free to use the rest. `addon`: the name of koffi. `from`: the file
 * for which that is resolved. The spawner gets this as text: nothing outside the function exists there.
 */
export function unmapperOf(addon: string, from: string): () => void {
  const { readFileSync, realpathSync } = process.getBuiltinModule('node:fs');
  const { createRequire } = process.getBuiltinModule('node:module');

  function load(): Advise | undefined {
    try {
      // An addon has no types here.
      const koffi = createRequire(from)(addon) as Koffi<Advise>;
      return koffi.load(null).func('int madvise(uintptr_t start, size_t length, int advice)');
    } catch {
      return undefined;
    }
  }

  function mappings(): string[] {
    try {
      return readFileSync('/proc/self/smaps', 'latin1').split(/^(?=[0-9a-f]+-[0-9a-f]+ )/m);
    } catch {
      // A /proc that shows less than is usual.
      return [];
    }
  }

  const madvise = load();
  if (!madvise) return () => {};
  // madvise(2): MADV_DONTNEED.
  const dontNeed = 4;
  const program = realpathSync(process.execPath);
  return () => {
    // proc_pid_smaps(5). Only what is as it is on disk: what was written there would be lost.
    for (const mapping of mappings()) {
      const [, begin = '', end = '', mode = '', file] =
        /^(\w+)-(\w+) (\S+) \S+ \S+ \d+ *(.*)$/m.exec(mapping) ?? [];
      if (file !== program || mode.includes('w') || !/^Anonymous: +0 kB$/m.test(mapping)) continue;
      const start = Number.parseInt(begin, 16);
      madvise(start, Number.parseInt(end, 16) - start, dontNeed);
    }
  };
}

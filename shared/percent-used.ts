// The used share of memory or of a file system.

interface Space {
  total: number;
  used: number;
  available?: number | undefined;
}

/**
 * Returns the used share in percent, from 0 to 100; undefined if the size is unknown. As in df(1), space that is
 * reserved for root counts as neither used nor available.
 */
export function percentUsed({ total, used, available = total - used }: Space): number | undefined {
  const usable = used + available;
  return usable > 0 ? Math.min(100, (100 * used) / usable) : undefined;
}

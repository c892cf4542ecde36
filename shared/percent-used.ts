// The used share of memory or of a file system.

interface Space {
  total: number;
  used: number;
  available?: number | undefined;
}

/**
 * Returns the used share in percent (0 to 100) as df(1) computes it: used / (used + available). Space that only root
 * may use is not counted. Returns undefined if the size is unknown.
 */
export function percentUsed({ total, used, available = total - used }: Space): number | undefined {
  const usable = used + available;
  return usable > 0 ? Math.min(100, (100 * used) / usable) : undefined;
}

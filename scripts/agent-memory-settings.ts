// Flags of Node and environment variables with which an agent needs less memory. Its transfers are not slower.

export const agentFlags = [
  '--optimize-for-size',
  '--max-semi-space-size=1',
  '--single-threaded',
  '--v8-pool-size=0',
  // The optimizing compiler, 5 MiB of Node's binary, is loaded late: it is not worthwhile for functions that run
  // only at the start.
  '--invocation-count-for-turbofan=30000',
  // The heap snapshot in Node's binary would save 0.04 s at the start and take 4 MiB more memory.
  '--no-node-snapshot',
];

/** One arena of malloc(3): several threads with arenas of their own retain more freed memory. */
export const agentVariables = { MALLOC_ARENA_MAX: '1' };

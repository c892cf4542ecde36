// Tests use real sockets, processes and files, so each file runs in a process of its own.
import { availableParallelism } from 'node:os';
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    environment: 'node',
    include: ['test/**/*.test.ts'],
    pool: 'forks',
    // Unless told, a machine with two cores would have one of them wait.
    maxWorkers: Math.max(2, availableParallelism() - 1),
    testTimeout: 20_000,
    hookTimeout: 20_000,
    // A busy machine is slow, not wrong.
    expect: { poll: { timeout: 10_000 } },
    // A rejection nobody handles is a bug of ours: it fails the run even if every test passed.
    dangerouslyIgnoreUnhandledErrors: false,
  },
});

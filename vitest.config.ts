// Tests use real sockets, processes and files, so each file runs in a process of its own.
import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    environment: 'node',
    include: ['test/**/*.test.ts'],
    pool: 'forks',
    testTimeout: 20_000,
    hookTimeout: 20_000,
    // A busy machine is slow, not wrong.
    expect: { poll: { timeout: 10_000 } },
    // A rejection nobody handles is a bug of ours: it fails the run even if every test passed.
    dangerouslyIgnoreUnhandledErrors: false,
  },
});

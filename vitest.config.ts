// Tests use real sockets, processes and files, so worker processes run them, not threads.
import { availableParallelism } from 'node:os';
import { defineConfig } from 'vitest/config';
import { BaseSequencer, type TestSpecification } from 'vitest/node';

/** Test files by tier. Only `box` needs root and Debian packages; CONTRIBUTING.md says what each tier tests. */
const tiers = {
  default: 'test/*.test.ts',
  cli: 'test/cli/*.test.ts',
  agent: 'test/agent/*.test.ts',
  faults: 'test/faults/*.test.ts',
  box: 'test/box/*.test.ts',
  attack: 'test/attack/*.test.ts',
  console: 'test/console/*.test.ts',
  postgres: 'test/postgres/*.test.ts',
  cluster: 'test/cluster/*.test.ts',
};

/**
 * Tiers whose files share worker processes, one file after another, because their tests break nothing in the process.
 * They start after all other tiers. A tier with a few long files does not belong here, because it would leave workers
 * idle at the end.
 */
const sharedProcess = ['default', 'cli'];

/** Test files that take longest. They start first, so that none of them runs alone at the end. */
const slowest = [
  'box/upgrades',
  'postgres/several-brokers',
  'console/pages-accessibility',
  'box/service-container',
  // These two reuse the packages that box/upgrades builds.
  'box/installed-packages',
  'box/service-packages',
  'faults/upgrade-fleet',
  'faults/schedules-survive-kills',
  'cluster/without-database',
  'agent/processes',
  'cli/programs',
  'postgres/alerts-of-several-brokers',
  'console/broker-restart',
  'box/inventory-package-managers',
  'test/schedules-on-change',
  'faults/commands-survive-failures',
  'agent/terminals',
];

class SlowestFirst extends BaseSequencer {
  override async sort(files: TestSpecification[]): Promise<TestSpecification[]> {
    const sorted = await super.sort(files);
    const placeOf = ({ moduleId }: TestSpecification): number => {
      const place = slowest.findIndex((name) => moduleId.endsWith(`/${name}.test.ts`));
      return place < 0 ? slowest.length : place;
    };
    return sorted.toSorted((one, other) => placeOf(one) - placeOf(other));
  }
}

export default defineConfig({
  test: {
    environment: 'node',
    pool: 'forks',
    // Larger young generations take an eighth more CPU time.
    execArgv: ['--max-semi-space-size=16'],
    // More workers than cores, because tests mostly wait for disks, timers and other processes.
    maxWorkers: Math.max(4, availableParallelism()),
    // Tests may be slow on a busy machine. Only tests about time have shorter limits of their own.
    testTimeout: 120_000,
    hookTimeout: 120_000,
    expect: { poll: { timeout: 60_000 } },
    // An unhandled rejection is a defect of the product. It fails the run even if every test passed.
    dangerouslyIgnoreUnhandledErrors: false,
    setupFiles: ['test/setup.ts'],
    sequence: { sequencer: SlowestFirst },
    projects: Object.entries(tiers).map(([name, include]) => ({
      extends: true,
      test: {
        name,
        include: [include],
        globalSetup: [
          'test/global-setup.ts',
          ...(name === 'console' ? ['test/console/global-setup.ts'] : []),
        ],
        // A separate process for each file costs a second of loading. Only tests that break things in their process
        // need it.
        isolate: !sharedProcess.includes(name),
      },
    })),
  },
});

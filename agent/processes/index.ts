// Runs the commands and terminals of this machine. Each id starts at most once. Its result and output are
// stored until the broker acknowledges them.
import { mkdir, realpath } from 'node:fs/promises';
import { join } from 'node:path';
import type { AgentMethods, Method } from '../../shared/agent-rpcs.ts';
import { after } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import { createCgroups } from './cgroup.ts';
import { Commands } from './commands.ts';
import { recover, recoverJournal } from './crash-recovery.ts';
import { removeOrphans } from './remove-orphans.ts';
import { defaultLimits, type Limits, type Parts } from './running-process.ts';
import { Spawners } from './spawner/spawner-pool.ts';
import { PipeNames } from './stdin-stdout-pipes.ts';
import { Terminals } from './terminals/index.ts';
import { loadPtyMaker } from './terminals/pty.ts';

export interface ProcessesOptions {
  /** Directory of the journal, output and pipes. Created with mode 0700 if it is missing. */
  directory: string;
  log: Logger;
  mayRunAs: boolean;
  limits?: Partial<Limits>;
}

type Methods = Commands['methods'] &
  Terminals['methods'] &
  Pick<AgentMethods, 'killProcess' | 'forgetProcesses'>;

// The functions are declared as properties and need no `this`, so that the object can be spread into the table of
// handlers.
export interface Processes extends Methods {
  /** Random id of the journal. If it has changed, the broker knows that the machine's data was lost. */
  journalId: string;
  /** Rpc methods that this machine does not support. */
  missing: readonly Method[];
  pids: () => number[];
  /** Ids of the commands and terminals whose results the broker has not acknowledged. */
  ids: () => string[];
  /** Number of commands and terminals that run or are about to start. */
  running: () => number;
  /** `true` makes new commands and terminals fail with `unavailable`; `false` allows them again. */
  refuseStarts: (refuse: boolean) => void;
  /** Closes everything. Commands and terminals that still run are killed and count as lost. */
  stop: () => Promise<void>;
}

/** Opens the data directory. Processes that an earlier run of the agent left are killed and count as lost. */
export async function startProcesses(options: ProcessesOptions): Promise<Processes> {
  const { log } = options;
  const limits = { ...defaultLimits, ...options.limits };
  await mkdir(options.directory, { recursive: true, mode: 0o700 });
  const directory = await realpath(options.directory);
  const journal = await recoverJournal(directory, limits, log);
  const cgroups = await createCgroups(`farhand-${journal.id}`, log);
  const { lateMs } = limits;
  const spawners = new Spawners(journal.id, { lateMs, cgroup: cgroups?.directory, log });
  const parts: Parts = { journal, limits, log, spawners, cgroups };
  try {
    return await assemble(parts, directory, options.mayRunAs);
  } catch (error) {
    await Promise.all([spawners.stop(), journal.close()]);
    await cgroups?.close();
    throw error;
  }
}

async function assemble(parts: Parts, directory: string, mayRunAs: boolean): Promise<Processes> {
  const { journal, spawners, cgroups, limits } = parts;
  const outputs = join(directory, 'output');
  const pipes = join(directory, 'pipes');
  const recovered = await recover(parts, outputs, pipes);
  const names = await PipeNames.open(pipes);
  const maker = loadPtyMaker();
  const commands = new Commands({ ...parts, outputs, names, mayRunAs }, recovered);
  const terminals = new Terminals({ ...parts, maker });
  const registries = [commands, terminals];
  const stopRemoving = removeOrphans(limits.orphansMs);
  return {
    ...commands.methods,
    ...terminals.methods,
    journalId: journal.id,
    missing: maker ? [] : ['OpenTerminal', 'KeepTerminal', 'AttachTerminal'],
    pids: () => spawners.pids,
    ids: () => registries.flatMap((registry) => registry.ids()),
    running: () => registries.reduce((sum, registry) => sum + registry.runningCount, 0),
    refuseStarts(refuse) {
      for (const registry of registries) registry.refusesStarts = refuse;
    },
    async killProcess({ id, grace_ms }) {
      const found = registries.some((registry) => registry.kill(id, grace_ms));
      if (!found && !journal.wasForgotten(id)) throw commands.notFound(id);
      return {};
    },
    async forgetProcesses({ ids }) {
      for (const id of ids) for (const registry of registries) await registry.forget(id);
      return {};
    },
    async stop() {
      stopRemoving();
      // If commands are left after this time, all spawners are killed: a command that was sent to a hung spawner ends
      // only with that spawner.
      const cancel = after(limits.stopGraceMs + limits.lateMs, () => void spawners.stop());
      await Promise.all(registries.map((registry) => registry.stop())).finally(cancel);
      await spawners.stop();
      await cgroups?.close();
      await names.close();
      await journal.close();
    },
  };
}

// Processes of this machine: started at most once per id, kept with their output until the broker forgets them.
import { mkdir, realpath } from 'node:fs/promises';
import { join } from 'node:path';
import { after } from '../../shared/clock.ts';
import {
  killGraceMs,
  openCommands,
  openTerminals,
  outputWindowBytes,
  readerStallMs,
  terminalClients,
  terminalWindowBytes,
} from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
import type { AgentMethods, Method } from '../../shared/rpc.ts';
import { openBirths } from './births.ts';
import { Commands } from './commands.ts';
import { openJournal } from './journal.ts';
import { openPipeSupply } from './pipes.ts';
import { closeInherited } from './plan.ts';
import { Promises } from './promises.ts';
import { killSpawners, recover } from './recover.ts';
import type { Limits, Parts } from './room.ts';
import { marksOf, Spawners } from './spawner/index.ts';
import { Terminals } from './terminals/index.ts';
import { loadPtyMaker } from './terminals/pty.ts';

export interface ProcessesOptions {
  /** Journal, output and pipes live below it; made when missing, for this user only. */
  directory: string;
  log: Logger;
  /** Whether commands may name another user. */
  mayRunAs: boolean;
  limits?: Partial<Limits>;
}

// Methods as properties, so that they can be spread into the table of handlers.
export interface Processes
  extends Pick<
    AgentMethods,
    | 'startProcess'
    | 'followProcess'
    | 'writeInput'
    | 'signalProcess'
    | 'openTerminal'
    | 'keepTerminal'
    | 'attachTerminal'
    | 'killProcess'
    | 'forgetProcesses'
  > {
  /** Made when the journal was made: tells a restarted machine from a wiped one. */
  journalId: string;
  /** What this machine cannot do. */
  missing: readonly Method[];
  /** What runs of ours to run others. */
  pids: () => number[];
  /** Commands and terminals kept for the broker. */
  ids: () => string[];
  /** Ends everything: what still runs is killed and counts as lost. */
  stop: () => Promise<void>;
}

const defaults: Limits = {
  windowBytes: outputWindowBytes,
  stallMs: readerStallMs,
  open: openCommands,
  graceMs: killGraceMs,
  stopGraceMs: 2_000,
  drainMs: 2_000,
  killForMs: 5_000,
  lateMs: 5_000,
  seenMs: 24 * 3_600_000,
  terminals: openTerminals,
  clients: terminalClients,
  terminalWindowBytes,
  hangupMs: 2_000,
  heldMs: 5_000,
};

/** Opens the room of a directory; what an earlier agent left running is killed and counts as lost. */
export async function openProcesses(options: ProcessesOptions): Promise<Processes> {
  const { log, mayRunAs } = options;
  const limits = { ...defaults, ...options.limits };
  await mkdir(options.directory, { recursive: true, mode: 0o700 });
  const directory = await realpath(options.directory);
  closeInherited(log);
  const journal = await openJournal(directory, log, limits.seenMs, (id) =>
    killSpawners(marksOf(id), limits.killForMs, log),
  );
  const outputs = join(directory, 'output');
  const pipeNames = join(directory, 'pipes');
  const births = await openBirths(`farhand-${journal.id}`, log);
  const promises = (nth: number) => new Promises(directory, nth, () => journal.onDisk());
  const spawners = new Spawners(journal.id, { lateMs: limits.lateMs, births, log, promises });
  const maker = loadPtyMaker();
  const parts: Parts = { journal, limits, log, spawners, births };
  const { commands, terminals, close } = await openRooms().catch(async (error: unknown) => {
    await Promise.all([spawners.stop(), journal.close()]);
    await births?.close();
    throw error;
  });
  return {
    journalId: journal.id,
    missing: maker ? [] : ['OpenTerminal', 'KeepTerminal', 'AttachTerminal'],
    pids: () => spawners.pids,
    ids: () => [...commands.room.ids(), ...terminals.room.ids()],
    startProcess: (request, call) => commands.start(request, call),
    followProcess: (request, call) => commands.follow(request, call),
    writeInput: (request, call) => commands.input(request, call),
    signalProcess: (request, call) => commands.signal(request, call),
    openTerminal: (request, call) => terminals.open(request, call),
    keepTerminal: (request, call) => terminals.keep(request, call),
    attachTerminal: (requests, call) => terminals.attach(requests, call),
    async killProcess({ id, grace_ms }) {
      const found = commands.room.kill(id, grace_ms) || terminals.room.kill(id, grace_ms);
      if (!found && !journal.wasForgotten(id)) throw commands.room.notFound(id);
      return {};
    },
    async forgetProcesses({ ids }) {
      for (const id of ids) {
        await commands.room.forget(id);
        await terminals.room.forget(id);
      }
      return {};
    },
    async stop() {
      // What was asked of a spawner that hangs is not killed before that.
      const cancel = after(limits.stopGraceMs + limits.lateMs, () => void spawners.stop());
      await Promise.all([commands.room.stop(), terminals.room.stop()]).finally(cancel);
      await spawners.stop();
      await births?.close();
      await close();
      await journal.close();
    },
  };

  async function openRooms() {
    const left = await recover({
      journal,
      outputs,
      pipes: pipeNames,
      limits,
      log,
    });
    const ended = new Map([...journal.entries].filter(([, { terminal }]) => terminal));
    const pipes = await openPipeSupply(pipeNames);
    await spawners.ready(undefined).catch(async (error: unknown) => {
      await pipes.close();
      throw error;
    });
    return {
      commands: new Commands({ ...parts, outputs, pipes, mayRunAs }, left),
      terminals: new Terminals({ ...parts, maker }, ended),
      close: () => pipes.close(),
    };
  }
}

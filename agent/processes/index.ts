// Processes of this machine: started at most once per id, kept with their output until the broker forgets them.
import { mkdir, realpath } from 'node:fs/promises';
import { join } from 'node:path';
import { killGraceMs, openCommands, outputWindowBytes, readerStallMs } from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
import type { AgentMethods } from '../../shared/rpc.ts';
import { openBirths } from './births.ts';
import { openJournal } from './journal.ts';
import { openPipeSupply } from './pipes.ts';
import { closeInherited } from './plan.ts';
import { recover } from './recover.ts';
import { type Limits, Room } from './room.ts';
import { Spawner } from './spawner/index.ts';

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
    'startProcess' | 'followProcess' | 'writeInput' | 'signalProcess' | 'killProcess' | 'forgetProcesses'
  > {
  /** Made when the journal was made: tells a restarted machine from a wiped one. */
  journalId: string;
  /** Processes kept for the broker. */
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
  seenMs: 24 * 3_600_000,
};

/** Opens the room of a directory; what an earlier agent left running is killed and counts as lost. */
export async function openProcesses(options: ProcessesOptions): Promise<Processes> {
  const { log, mayRunAs } = options;
  const limits = { ...defaults, ...options.limits };
  await mkdir(options.directory, { recursive: true, mode: 0o700 });
  const directory = await realpath(options.directory);
  closeInherited(log);
  const journal = await openJournal(directory, log, limits.seenMs);
  const outputs = join(directory, 'output');
  const pipeNames = join(directory, 'pipes');
  const births = await openBirths(`farhand-${journal.id}`, log);
  const spawner = new Spawner(journal.id, births, log);
  const room = await openRoom().catch(async (error: unknown) => {
    await Promise.all([spawner.stop(), journal.close()]);
    await births?.close();
    throw error;
  });
  return {
    journalId: journal.id,
    ids: () => room.ids(),
    startProcess: (request, call) => room.start(request, call),
    followProcess: (request, call) => room.follow(request, call),
    writeInput: (request, call) => room.input(request, call),
    signalProcess: (request, call) => room.signal(request, call),
    killProcess: (request) => room.kill(request),
    forgetProcesses: (request) => room.forget(request),
    stop: () => room.stop(),
  };

  async function openRoom(): Promise<Room> {
    const left = await recover({
      journal,
      outputs,
      pipes: pipeNames,
      spawner: spawner.mark,
      limits,
      log,
    });
    const pipes = await openPipeSupply(pipeNames);
    await spawner.ready();
    return new Room({ journal, outputs, limits, log, pipes, spawner, births, mayRunAs }, left);
  }
}

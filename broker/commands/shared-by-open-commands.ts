// What all open commands of a broker share.
import { killGraceMs } from '../../shared/command-and-terminal-limits.ts';
import type { Logger } from '../../shared/logger.ts';
import type { TurnLimit } from '../event-loop-turn-limit.ts';
import type { Acknowledgements } from '../link/acknowledge-results.ts';
import type { CommandServices, CommandStore } from './command-store.ts';
import type { OutputDirectory } from './stored-output.ts';

/** Milliseconds to wait for a cancelled command: from SIGTERM to SIGKILL, and a second to report the end. */
export const cancelWaitMs = killGraceMs + 1_000;

/** The services, store and scheduler that all open commands share. */
export interface CommandContext extends CommandServices {
  store: CommandStore;
  outputs: OutputDirectory;
  scheduler: OpenCommands;
  acknowledgements: Acknowledgements;
  /** Limits how many final records of commands are written in one turn of the event loop. */
  ends: TurnLimit;
  /** Fires when the broker stops. */
  stopping: AbortSignal;
  log: Logger;
}

/** The methods of the scheduler that a command calls until it has ended. */
interface OpenCommands {
  remove(id: string): void;
  /** Makes the scheduler decide soon which waiting commands start. */
  decideSoon(): void;
}

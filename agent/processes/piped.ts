// What a command reads and writes: pipes into its logs, and an input.
import type { FileHandle } from 'node:fs/promises';
import type { Logger } from '../../shared/logger.ts';
import type { OutputLog } from '../../shared/output.ts';
import { Input } from './input.ts';
import type { Pipes } from './pipes.ts';
import type { Plan } from './plan.ts';
import { drain } from './pump.ts';
import type { Stdio } from './run.ts';

export interface PipedOptions {
  id: string;
  plan: Plan;
  pipes: Pipes;
  /** Its whole input, or none. */
  stdin: FileHandle | undefined;
  /** The begin of an input that stays open. */
  first: Uint8Array | undefined;
  stdout: OutputLog;
  stderr: OutputLog;
  log: Logger;
}

export interface Piped extends Stdio {
  /** Only where it was started with one. */
  input: Input | undefined;
}

/** The pipes are its own from now on. */
export function openPiped({ id, plan, pipes, stdin, first, stdout, stderr, log }: PipedOptions): Piped {
  const [out, err] = pipes.pumps;
  const pumps = [out.into(stdout, id, log), err.into(stderr, id, log)];
  const input = pipes.input === undefined ? undefined : new Input(pipes.input, first ?? Buffer.alloc(0));
  const [outPath = '', errPath = ''] = pipes.paths;
  // A file without a name is found through us.
  const whole = stdin && `/proc/${process.pid}/fd/${stdin.fd}`;
  return {
    input,
    links: pipes.paths,
    request: {
      file: plan.file,
      args: plan.args,
      stdin: whole ?? pipes.inputPath,
      stdout: outPath,
      stderr: errPath,
    },
    handedOver: pipes.handedOver,
    drain(ms) {
      // What is still in its pipes is small.
      for (const output of [stdout, stderr]) output.release();
      return drain(pumps, ms);
    },
    close(clean) {
      input?.close();
      // What another user had open is not used again: it might still write there by its name in /proc.
      pipes.giveBack(clean && !plan.foreign);
    },
  };
}

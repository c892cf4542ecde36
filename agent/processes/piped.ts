// What a command reads and writes: pipes into its logs, and an input.
import { closeSync } from 'node:fs';
import type { FileHandle } from 'node:fs/promises';
import { Socket } from 'node:net';
import type { Logger } from '../../shared/logger.ts';
import type { OutputLog } from '../../shared/output.ts';
import { Input } from './input.ts';
import type { Pipes } from './pipes.ts';
import type { Plan } from './plan.ts';
import { drain, type Pump, pump } from './pump.ts';
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

/** The pipes are its own from now on, also when it throws. */
export function openPiped({ id, plan, pipes, stdin, first, stdout, stderr, log }: PipedOptions): Piped {
  const { ours, theirs, input: inputs } = open(pipes, plan.foreign);
  const read = (fd: number, output: OutputLog): Pump =>
    pump((onread) => new Socket({ fd, readable: true, writable: false, onread }), output, id, log);
  // While it starts: the pipes have no end before the child's ends, which we hold too, are closed.
  const pumps = [read(ours[0], stdout), read(ours[1], stderr)];
  const input = inputs && new Input(inputs.ours, first ?? Buffer.alloc(0));
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
    handedOver() {
      for (const fd of theirs) closeSync(fd);
      if (inputs) closeSync(inputs.theirs);
    },
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

function open(pipes: Pipes, shared: boolean): ReturnType<Pipes['open']> {
  try {
    return pipes.open(shared);
  } catch (error) {
    pipes.giveBack(false);
    throw error;
  }
}

// Commands of this machine: started, followed, given input, sent signals.
import { join } from 'node:path';
import type { FollowProcessRequest__Output } from '../../proto/types/farhand/agent/v1/FollowProcessRequest.ts';
import type { ProcessSpec__Output } from '../../proto/types/farhand/agent/v1/ProcessSpec.ts';
import type { SignalProcessRequest__Output } from '../../proto/types/farhand/agent/v1/SignalProcessRequest.ts';
import type { StartProcessRequest__Output } from '../../proto/types/farhand/agent/v1/StartProcessRequest.ts';
import type { WriteInputRequest__Output } from '../../proto/types/farhand/agent/v1/WriteInputRequest.ts';
import { AppError } from '../../shared/errors.ts';
import { newOutput, type OutputLog, Wake } from '../../shared/output.ts';
import type { AgentCall } from '../../shared/rpc.ts';
import { isSignal } from '../../shared/signals.ts';
import { type Answer, type Followed, follow } from './follow.ts';
import type { Input } from './input.ts';
import type { Exit } from './journal.ts';
import { openPiped, type Piped } from './piped.ts';
import { openInput, type PipeSupply } from './pipes.ts';
import { plan } from './plan.ts';
import { outputNames } from './recover.ts';
import { type Kept, type Parts, type Prepared, Room } from './room.ts';
import { signalGroup } from './tree.ts';

interface CommandParts extends Parts {
  outputs: string;
  pipes: PipeSupply;
  mayRunAs: boolean;
}

class Command implements Kept, Followed {
  readonly changed: Wake;
  readonly stdout: OutputLog;
  readonly stderr: OutputLog;
  input: Input | undefined;
  started?: { pid: number; at: number };
  exit?: Exit;

  constructor(from: Followed) {
    this.changed = from.changed;
    this.stdout = from.stdout;
    this.stderr = from.stderr;
    if (from.started) this.started = from.started;
    if (from.exit) this.exit = from.exit;
  }

  written(): Pick<Exit, 'stdout_bytes' | 'stderr_bytes'> {
    return { stdout_bytes: this.stdout.end, stderr_bytes: this.stderr.end };
  }

  async close(): Promise<void> {
    await Promise.all([this.stdout.close(), this.stderr.close()]);
  }

  async remove(): Promise<void> {
    await Promise.all([this.stdout.remove(), this.stderr.remove()]);
  }
}

const fromStart = { stdout: 0, stderr: 0 };

export class Commands {
  readonly room: Room<Command>;
  readonly #parts: CommandParts;

  /** `left`: what earlier agents kept, all of it over. */
  constructor(parts: CommandParts, left: ReadonlyMap<string, Followed>) {
    this.#parts = parts;
    const kind = {
      name: 'command',
      notFound: 'command_not_found',
      limit: parts.limits.open,
      make: (id: string) => this.#make(id),
    } as const;
    const kept = new Map([...left].map(([id, one]) => [id, new Command(one)]));
    this.room = new Room(parts, kind, kept);
  }

  start({ id, spec }: StartProcessRequest__Output, call: AgentCall): AsyncIterable<Answer> {
    const find = async (): Promise<Followed> => {
      if (!spec) throw new AppError('invalid_request', 'a command needs a spec');
      return this.room.start(id, call, (command) => this.#prepare(id, spec, command));
    };
    return follow(find, fromStart, call.signal);
  }

  follow(request: FollowProcessRequest__Output, call: AgentCall): AsyncIterable<Answer> {
    const offsets = { stdout: request.stdout_offset, stderr: request.stderr_offset };
    return follow(async () => this.room.known(request.id), offsets, call.signal);
  }

  /** Waits for the start; bytes go in the order of the calls. */
  async input(
    { id, data, offset, end }: WriteInputRequest__Output,
    call: AgentCall,
  ): Promise<{ taken: number }> {
    const { input } = await this.room.running(id, call.signal);
    if (!input) throw new AppError('conflict', 'the command was not started with input');
    return { taken: input.write(data, offset, end) };
  }

  async signal({ id, signal }: SignalProcessRequest__Output, call: AgentCall): Promise<object> {
    if (!isSignal(signal)) throw new AppError('invalid_request', `no signal that may be sent: ${signal}`);
    const { run } = await this.room.running(id, call.signal);
    if (!signalGroup(run, signal)) throw new AppError('conflict', 'the command is over', { command_id: id });
    return {};
  }

  #make(id: string): Command {
    const { outputs, limits } = this.#parts;
    const changed = new Wake();
    const options = { windowBytes: limits.windowBytes, stallMs: limits.stallMs, changed };
    const { stdout, stderr } = outputNames(id);
    const log = (name: string): OutputLog => newOutput(join(outputs, name), options);
    return new Command({ changed, stdout: log(stdout), stderr: log(stderr) });
  }

  async #prepare(id: string, spec: ProcessSpec__Output, command: Command): Promise<Prepared> {
    const { mayRunAs, outputs, log } = this.#parts;
    const planned = await plan(id, spec, mayRunAs);
    const fixed = spec.stdin.length > 0 && !spec.input;
    const stdin = fixed ? await openInput(spec.stdin, outputs) : undefined;
    const first = spec.input ? spec.stdin : undefined;
    const { stdout, stderr } = command;
    let piped: Piped;
    try {
      const pipes = await this.#parts.pipes.take(spec.input, planned.foreign);
      piped = openPiped({ id, plan: planned, pipes, stdin, first, stdout, stderr, log });
    } catch (error) {
      await stdin?.close();
      throw error;
    }
    let given = false;
    return {
      plan: planned,
      first: 'SIGTERM',
      timeoutMs: spec.timeout_ms,
      open() {
        given = true;
        command.input = piped.input;
        return piped;
      },
      async done() {
        try {
          if (!given) await unused(piped);
        } finally {
          await stdin?.close();
        }
      },
    };
  }
}

/** Nobody else has had its other ends. */
async function unused(piped: Piped): Promise<void> {
  piped.handedOver();
  await piped.drain(0);
  piped.close(true);
}

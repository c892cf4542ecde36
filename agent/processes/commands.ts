// Starts the commands of this machine, follows their output, and sends them input and signals.
import { join } from 'node:path';
import type { ProcessSpec__Output } from '../../proto/types/farhand/agent/v1/ProcessSpec.ts';
import type { AgentMethods } from '../../shared/agent-rpcs.ts';
import { AppError } from '../../shared/errors.ts';
import { OutputLog } from '../../shared/output-log.ts';
import { isSignal } from '../../shared/signals.ts';
import { outputNames, type Recovered } from './crash-recovery.ts';
import { follow } from './follow-output.ts';
import { signalGroup } from './kill-tree.ts';
import { plan } from './launch-plan.ts';
import type { Exit } from './process-journal.ts';
import { ProcessRegistry, Tracked } from './process-registry.ts';
import type { Parts, Prepared } from './running-process.ts';
import { type Input, Piped, type PipeNames } from './stdin-stdout-pipes.ts';

interface CommandParts extends Parts {
  outputs: string;
  names: PipeNames;
  mayRunAs: boolean;
}

export class Command extends Tracked {
  readonly stdout: OutputLog;
  readonly stderr: OutputLog;
  input: Input | undefined;

  /** `stored`: journal entry and output logs of a command that was started before the agent's last restart. */
  constructor(id: string, { outputs, limits }: CommandParts, stored?: Recovered) {
    super(id);
    const names = outputNames(id);
    const options = { windowBytes: limits.windowBytes, stallMs: limits.stallMs, changed: this.changed };
    this.stdout = stored?.stdout ?? new OutputLog(join(outputs, names.stdout), options);
    this.stderr = stored?.stderr ?? new OutputLog(join(outputs, names.stderr), options);
    if (stored) this.restore(stored.entry);
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

type CommandMethods = Pick<AgentMethods, 'startProcess' | 'followProcess' | 'writeInput' | 'signalProcess'>;

export class Commands extends ProcessRegistry<Command, CommandParts> {
  constructor(parts: CommandParts, recovered: ReadonlyMap<string, Recovered>) {
    super(parts, { name: 'command', notFound: 'command_not_found', limit: parts.limits.open });
    this.restore([...recovered].map(([id, stored]) => new Command(id, parts, stored)));
  }

  protected create(id: string): Command {
    return new Command(id, this.parts);
  }

  readonly methods: CommandMethods = {
    startProcess: ({ id, spec }, { signal }) => {
      const find = async (): Promise<Command> => {
        if (!spec)
          throw new AppError('invalid_request', 'the request to start a command must contain `spec`');
        return this.start(id, signal, (command) => this.#prepare(spec, command));
      };
      return follow(find, fromStart, signal);
    },

    followProcess: (request, { signal }) => {
      const offsets = { stdout: request.stdout_offset, stderr: request.stderr_offset };
      return follow(async () => this.find(request.id), offsets, signal);
    },

    /** Waits until the command has started, then writes the bytes in the order of the calls. */
    writeInput: async ({ id, data, offset, end }, { signal }) => {
      const { one } = await this.running(id, signal);
      if (!one.input) {
        const message = 'the command takes no input; start it with `input`: true';
        throw new AppError('conflict', message, { command_id: id });
      }
      return { taken: one.input.write(data, offset, end) };
    },

    signalProcess: async ({ id, signal }, call) => {
      if (!isSignal(signal))
        throw new AppError('invalid_request', `${signal} is not a signal that may be sent`);
      const { running } = await this.running(id, call.signal);
      if (!signalGroup(running.child, signal))
        throw new AppError('conflict', 'the command has ended, so it takes no signals', { command_id: id });
      return {};
    },
  };

  async #prepare(spec: ProcessSpec__Output, command: Command): Promise<Prepared> {
    const planned = await plan(command.id, spec, this.parts.mayRunAs);
    const stdio = await Piped.open({ ...this.parts, command, plan: planned, spec });
    command.input = stdio.input;
    return { plan: planned, stdio, first: 'SIGTERM', timeoutMs: spec.timeout_ms };
  }
}

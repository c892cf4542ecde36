// REST handlers for commands: create, list, cancel, send input and signals, and read or stream the output.
import { commands as routes } from '../../shared/api/commands.ts';
import type { Api, Caller, Handlers, Input, Journal, Page } from '../../shared/api/route-table.ts';
import type { BatchId, CommandId, KeyId, MachineId, ScheduleId } from '../../shared/api/shared-schemas.ts';
import { monotonic } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { TurnLimit } from '../event-loop-turn-limit.ts';
import { ownedElsewhere } from '../history/group-commit.ts';
import type { HistoryTransaction } from '../history/history-database.ts';
import { Acknowledgements } from '../link/acknowledge-results.ts';
import { type Condition, filtersOf, pageOfRows, reachableOnly } from '../list-pages-and-filters.ts';
import { BatchFollower } from './batch-changes-by-other-brokers.ts';
import { Batches } from './batch-handlers.ts';
import { Scheduler } from './command-dispatcher.ts';
import {
  type Command,
  type CommandParams,
  type CommandRecord,
  capabilitiesFor,
  commandOf,
  type Status,
  specOf,
} from './command-record.ts';
import { type CommandServices, type CommandSettings, CommandStore } from './command-store.ts';
import { columns, countedCommands, fromRow } from './command-tables.ts';
import { listedBytes, serialize, serializeFor, serializeListed } from './command-to-json.ts';
import type { OpenCommand } from './open-command.ts';
import { bytesReply, eventsOf, type Part, partsFrom, sourceOf } from './read-output.ts';
import { type CommandContext, cancelWaitMs } from './shared-by-open-commands.ts';
import { OutputDirectory, type Stream } from './stored-output.ts';

/** The parameters of a schedule's command, and the key whose rights the command has. */
export interface ScheduledParams extends CommandParams {
  machine_id: MachineId;
  schedule_id: ScheduleId;
  key_id: KeyId;
  request_id: string;
}

/** A command that is stored on disk and may not have started yet. */
export interface AcceptedCommand {
  id: CommandId;
  /** The batch of the command, if startBatch() started it. */
  batch_id?: BatchId;
  /** Returns the record once the command has started or ended, or after `ms` milliseconds. */
  within(ms: number, signal: AbortSignal): Promise<CommandRecord>;
}

/** Maximum number of final records of commands that are written in one turn of the event loop. */
const mostEnds = 32;
const commandEvents = ['command.started', 'command.completed', 'command.failed', 'command.timeout'] as const;
/** Maximum number of bytes of input sent to the machine in one call. */
const inputBytes = 32 * 1024;

/**
 * Creates the modules that handle commands. A single broker first recovers the commands that had not ended when its
 * earlier process stopped.
 */
export async function createCommands(
  services: CommandServices,
  settings: CommandSettings,
  log: Logger,
): Promise<Commands> {
  const stop = new AbortController();
  const outputs = new OutputDirectory(settings.directory, log);
  const store = await CommandStore.open(services, outputs, settings);
  await outputs.removeAllBut(await store.withFiles());
  const acknowledgements = new Acknowledgements(services.presence, log);
  const ends = new TurnLimit(mostEnds);
  const context = { ...services, store, outputs, acknowledgements, ends, stopping: stop.signal, log };
  const scheduler = new Scheduler(context);
  const batches = new Batches({ ...context, scheduler });
  if (services.cluster) {
    const follower = await BatchFollower.open(store, scheduler);
    services.cluster.join(scheduler);
    services.cluster.follow(() => follower.read());
  } else await scheduler.recover();
  return new Commands({ ...context, scheduler, batches }, stop);
}

type Parts = CommandContext & { scheduler: Scheduler; batches: Batches };

export class Commands {
  readonly batches: Batches;
  readonly #parts: Parts;
  readonly #stop: AbortController;

  constructor(parts: Parts, stop: AbortController) {
    this.#parts = parts;
    this.#stop = stop;
    this.batches = parts.batches;
  }

  readonly handlers: Handlers['commands'] = {
    create: async (input, caller) => {
      const { scheduler, machineFacts } = this.#parts;
      const { machine_id } = input;
      machineFacts.assertAllows(machine_id, capabilitiesFor(input));
      const command = commandOf(input, { machine_id, key_id: caller.key_id });
      const also = (journal: Journal): void => caller.commit(journal, { command_id: command.id });
      const waitUntil = monotonic() + input.wait;
      const open = await scheduler.accept(command, specOf(input), caller.request_id, also);
      await open.untilEnded(waitUntil - monotonic(), caller.signal);
      return serialize(await open.current());
    },
    async: (input, caller) => this.handlers.create({ ...input, wait: 0 }, caller),
    list: (input, caller) => this.#list(routes.list, input, caller),
    ofMachine: (input, caller) => this.#list(routes.ofMachine, input, caller),
    get: ({ command_id }) => this.#record(command_id),
    cancel: async ({ command_id }, caller) => {
      const { scheduler } = this.#parts;
      const open = scheduler.get(command_id);
      await open?.cancel(caller);
      await open?.untilEnded(cancelWaitMs);
      const record = await this.#record(command_id);
      // The machine is moving to another broker, which does not know of this request.
      if (record.finished_at === null && !scheduler.get(command_id)) throw ownedElsewhere();
      return serializeFor(caller, record);
    },
    purge: async ({ machine_id }) => {
      if (!this.#parts.history.owns(machine_id)) throw ownedElsewhere();
      const waiting = this.#parts.scheduler.waiting(machine_id).filter(({ stored }) => stored);
      await Promise.all(waiting.map((open) => open.cancel()));
      return { cancelled: waiting.map(({ record }) => record.id) };
    },
    input: async (input, caller) => {
      const open = this.#running(input.command_id) ?? (await this.#refuse(input.command_id));
      // Input requests for one command run one after another, so that the inputs of two callers are not
      // mixed.
      const turn = open.input.then(() => this.#sendInput(open, input, caller));
      open.input = turn.catch(() => {});
      return { taken: await turn };
    },
    signal: async ({ command_id, signal }, caller) => {
      const { record } = this.#running(command_id) ?? (await this.#refuse(command_id));
      const { machine_id } = record;
      const { stub } = this.#parts.presence.get(machine_id);
      await stub.signalProcess({ id: command_id, signal }, { request_id: caller.request_id, caller });
      return serializeFor(caller, await this.#record(command_id));
    },
    output: async (input, caller) => {
      const source = await sourceOf(this.#parts, input.command_id);
      const { reply, from } = bytesReply(source, input, caller.signal);
      caller.headers.set('X-Output-Offset', String(from));
      return reply;
    },
    stream: async ({ command_id, last_event_id }, caller) => {
      const from = offsetsIn(last_event_id);
      return eventsOf(partsFrom(await sourceOf(this.#parts, command_id), from, caller.signal, true), from);
    },
  };

  /**
   * Stores a command for a schedule in one transaction with the writes of `also`. Then runs the command or
   * queues it. Throws the errors of POST /commands.
   */
  async start(
    params: ScheduledParams,
    also: (transaction: HistoryTransaction, id: CommandId) => void,
  ): Promise<AcceptedCommand> {
    const { scheduler, machineFacts } = this.#parts;
    machineFacts.assertAllows(params.machine_id, capabilitiesFor(params));
    const command = commandOf(params, params);
    const open = await scheduler.accept(command, specOf(params), params.request_id, (transaction) =>
      also(transaction, command.id),
    );
    return accepted(open);
  }

  /** Stores a batch, and starts its commands. Returns the first command. */
  async startBatch(...batch: Parameters<Batches['start']>): Promise<AcceptedCommand> {
    const { id, members, first } = await this.batches.start(...batch);
    if (!first) throw new Error('startBatch() was called without machines');
    const open = members.find(({ record }) => record.id === first.id);
    // If another broker owns the machine, within() does not wait. It returns the command as it was first stored.
    const begun = open ? accepted(open) : { id: first.id, within: async () => serialize(first) };
    return { ...begun, batch_id: id };
  }

  /**
   * Returns the records of the commands with these ids, each with the end of its output. Unknown ids are left
   * out.
   */
  async listed(ids: readonly string[]): Promise<Map<string, CommandRecord>> {
    const stored = await this.#parts.store.some(ids);
    const found = await Promise.all(stored.map((command) => this.#listed(command)));
    return new Map(found.map((command) => [command.id, command]));
  }

  /** Calls `watcher` with the id and the machine of each command that was created, started or ended. */
  watch(watcher: (id: CommandId, machine: MachineId) => void): () => void {
    const stop = this.#parts.store.watch(({ id, machine_id }) => watcher(id, machine_id));
    // The start and the end of each command, also on machines of other brokers.
    const stopOthers = this.#parts.events.listen(commandEvents, ({ data }) =>
      watcher(data.command_id as CommandId, data.machine_id as MachineId),
    );
    return () => {
      stop();
      stopOthers();
    };
  }

  /** Finds the machine of an open command. */
  machineOfOpen(id: string): MachineId | undefined {
    return this.#parts.scheduler.get(id)?.record.machine_id;
  }

  /** Finds the machine of a command in the history, and the data directory that has its output files. */
  whereIs(id: string): ReturnType<CommandStore['whereIs']> {
    return this.#parts.store.whereIs(id);
  }

  /**
   * Reads both output streams, beginning at these byte offsets. The last part reports the end of the command.
   */
  async follow(id: string, from: Record<Stream, number>, signal: AbortSignal): Promise<AsyncGenerator<Part>> {
    return partsFrom(await sourceOf(this.#parts, id), from, signal);
  }

  /** Stops the scheduler and wakes every request that waits for a command. */
  stop(): void {
    this.#stop.abort();
    this.#parts.scheduler.stop();
  }

  /** Closes the output files. Call it when no agent is linked any more. */
  async close(): Promise<void> {
    await Promise.all(this.#parts.scheduler.all().map(({ output }) => output.close()));
  }

  async #list(
    route: typeof routes.list | typeof routes.ofMachine,
    input: Input<typeof routes.list> | Input<typeof routes.ofMachine>,
    caller: Caller,
  ): Promise<Page<CommandRecord>> {
    const conditions = [
      reachableOnly(caller.reachable()),
      ...filtersOf(route, input, { status: statusIs(input.status) }),
    ];
    const page = await pageOfRows(
      this.#parts.history,
      {
        ...{ table: 'commands', columns, counted: countedCommands, tie: ['created_at', 'rowid'] },
        findBy: findBy(input.status),
      },
      conditions,
      input,
    );
    const items = page.items.map((row) => this.#listed(fromRow(row)));
    return { items: await Promise.all(items), total: page.total };
  }

  /** Returns the record for a list: the command's current state with the end of its output. */
  async #listed(command: Command): Promise<CommandRecord> {
    const open = this.#parts.scheduler.get(command.id);
    return serializeListed(open ? await open.current(listedBytes) : command);
  }

  async #record(id: string): Promise<CommandRecord> {
    const { scheduler, store } = this.#parts;
    return serialize((await scheduler.get(id)?.current()) ?? (await store.get(id)));
  }

  /**
   * Sends the data of a request to the command's stdin. Returns the number of bytes that the command has received from
   * all requests. If sending fails, `given` in the error's details is the number of bytes of this request that were
   * accepted.
   */
  async #sendInput(
    { record: { id, machine_id } }: OpenCommand,
    { data, encoding, offset, end }: Input<Api['commands']['input']>,
    caller: Caller,
  ): Promise<number> {
    const bytes = Buffer.from(data, encoding === 'base64' ? 'base64' : 'utf8');
    const options = { request_id: caller.request_id, caller, signal: caller.signal };
    for (let given = 0; ; ) {
      const piece = bytes.subarray(given, given + inputBytes);
      const last = given + piece.length === bytes.length;
      const at = offset === undefined ? {} : { offset: offset + given };
      try {
        const { stub } = this.#parts.presence.get(machine_id);
        const { taken } = await stub.writeInput({ id, data: piece, end: end && last, ...at }, options);
        given += piece.length;
        if (last) return taken;
      } catch (error) {
        if (!(error instanceof AppError)) throw error;
        const unknown = error.code === 'command_not_found';
        const code = unknown ? 'conflict' : error.code;
        const message = unknown ? unstarted(id) : error.message;
        const details = { ...error.details, given, ...(unknown && { started: false }) };
        throw new AppError(code, message, details, { cause: error });
      }
    }
  }

  /**
   * Finds a command that was sent to its machine and has not ended. This function is not async, so that two input
   * requests are queued in the order of their arrival.
   */
  #running(id: string): OpenCommand | undefined {
    const open = this.#parts.scheduler.get(id);
    return open?.state === 'dispatched' || open?.state === 'running' ? open : undefined;
  }

  /** Throws command_not_found, or conflict for a command that has not started or has ended. */
  async #refuse(id: string): Promise<never> {
    const open = this.#parts.scheduler.get(id);
    if (!open && (await this.#parts.store.get(id)).finished_at === null) throw ownedElsewhere();
    const started = open?.state !== 'queued';
    const message = started ? `command ${id} has ended, so it takes no more input or signals` : unstarted(id);
    throw new AppError('conflict', message, { command_id: id, started });
  }
}

function accepted(open: OpenCommand): AcceptedCommand {
  return {
    id: open.record.id,
    async within(ms, signal) {
      await open.untilStarted(ms, signal);
      return serialize(await open.current(listedBytes));
    },
  };
}

const unstarted = (id: string): string => `command ${id} has not started yet; try again later`;

/**
 * Puts the status into the text of the SQL query. With a bound parameter, the database could not use a partial index.
 * The text is safe, because the schema of the route accepts only known statuses.
 */
function statusIs(status: Status | undefined): Condition {
  return status && [`status = '${status}'`];
}

/**
 * Returns the indexed columns by which a list can filter, the most selective first. If a request filters by several of
 * them, SQLite uses only the index of the first one.
 */
function findBy(status: Status | undefined): string[] {
  const isOpen = status === 'queued' || status === 'running';
  const others = ['batch_id', 'schedule_id', 'machine_id', 'stdout_truncated', 'stderr_truncated'];
  if (isOpen) return ['status', ...others];
  // For a failure such as `timeout`, the returned list leaves out `status`, so the rule above does not apply to the
  // status. SQLite may then use any index that contains the status, including commands_failed, an index of machine and
  // status.
  return status === 'completed' ? [...others, 'status'] : others;
}

/** Parses an event id into the byte offsets of both streams after that event. */
export function offsetsIn(id = '0.0'): Record<Stream, number> {
  const [stdout = 0, stderr = 0] = id.split('.').map(Number);
  return { stdout, stderr };
}

// Commands over REST: accepted once, followed to their end, kept in history with their output.
import { commands as routes } from '../../shared/api/commands.ts';
import type { Api, Caller, Handlers, Input, Journal, Page } from '../../shared/api/index.ts';
import type { BatchId, CommandId, KeyId, MachineId, ScheduleId } from '../../shared/api/route.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import { textIn } from '../history.ts';
import { type Condition, filtersOf, pageOfRows, reachableOnly } from '../paging.ts';
import type { Presence } from '../presence/index.ts';
import { type Batches, openBatches } from './batches.ts';
import { commandOf, refuseLocked, specOf, type Wish } from './draft.ts';
import type { Stream } from './output.ts';
import { openOutputs } from './outputs.ts';
import { bytesOf, eventsFrom, type Part, partsFrom, type Source } from './reading.ts';
import {
  type Command,
  type CommandRecord,
  columns,
  fromRow,
  listedBytes,
  openRecords,
  type Records,
} from './records.ts';
import { current, type Run, runOf, waits } from './run.ts';
import { openRuns, type Rooms, type Runs } from './runs.ts';
import { listed, shown, shownTo } from './shown.ts';
import { cancelWaitMs } from './supervision.ts';
import { Turns } from './turns.ts';

export interface Commands {
  handlers: Handlers['commands'];
  batches: Batches;
  /** Has a command run for a schedule, written together with `also`. Throws what POST would answer. */
  start(order: Order, also: (journal: Journal, id: CommandId) => void): Promise<Begun>;
  /** Those of these ids that are known, with the end of their output. */
  listed(ids: readonly string[]): Promise<Map<string, CommandRecord>>;
  /** Both outputs as bytes from offsets on, and the end. */
  follow(id: string, from: Record<Stream, number>, signal: AbortSignal): Promise<AsyncGenerator<Part>>;
  /** The machine a command belongs to. */
  machineOf(id: string): MachineId | undefined;
  /** Wakes everybody who waits; nothing is started any more. */
  stop(): void;
  /** Gives the files back, once no link is left. */
  close(): Promise<void>;
}

/** What a schedule wants to have run, and with whose right. */
export interface Order extends Wish {
  machine_id: MachineId;
  schedule_id: ScheduleId;
  key_id: KeyId;
  request_id: string;
}

/** A command that is on disk. */
export interface Begun {
  id: CommandId;
  /** How it is once it has started or ended, after `ms` at the latest. */
  within(ms: number, signal: AbortSignal): Promise<CommandRecord>;
}

export interface CommandSettings {
  /** For the output of commands. */
  directory: string;
  /** Finished commands older than this go, in milliseconds. */
  keepMs: number;
  /** What the output of finished commands may take in all. */
  keepBytes: number;
}

/** Input goes to the machine in pieces of this size. */
const inputBytes = 32 * 1024;

/** Opens the room, and takes up what an earlier broker left open. */
export async function openCommands(rooms: Rooms, settings: CommandSettings, log: Logger): Promise<Commands> {
  const { history } = rooms;
  const records = openRecords(history, settings.keepMs, (ids) => outputs.forget(ids));
  const outputs = await openOutputs(settings.directory, { history, records, log }, settings.keepBytes);
  const turns = new Turns();
  const batchRooms = { ...rooms, records, turns };
  const batches = openBatches(batchRooms, settings.keepMs, () => runs, log);
  const open: Run[] = [];
  for (const command of records.open()) {
    const run = runOf(command, await outputs.reopen(command.id), newId('request'));
    open.push({ ...run, stored: true });
  }
  const batchOver = (id: BatchId): void => batches.over(id);
  const runs = openRuns({ ...rooms, records, outputs, turns, batchOver }, open, log);
  let closed = false;

  /** The output of a command, live while it runs. */
  async function sourceOf(id: string): Promise<Source> {
    const run = runs.get(id);
    if (run) {
      const ended = (): Command | undefined => (run.over ? run.command : undefined);
      return { output: run.output, ended, closed: () => closed };
    }
    const command = known(records.find(id), id);
    return { output: await outputs.of(command), ended: () => command, closed: () => closed };
  }

  return {
    async start(order, also) {
      refuseLocked(rooms, order.machine_id, order.user);
      const command = commandOf(order, order, order);
      const alongside = (journal: Journal): void => also(journal, command.id);
      const run = await runs.add(command, specOf(order), order.request_id, alongside);
      return {
        id: command.id,
        async within(ms, signal) {
          await runs.begun(run, ms, signal);
          return shown(await current(run, listedBytes));
        },
      };
    },
    async listed(ids) {
      const found = records.some(ids).map(async (command) => {
        const run = runs.get(command.id);
        return listed(run ? await current(run, listedBytes) : command);
      });
      return new Map((await Promise.all(found)).map((command) => [command.id, command]));
    },
    machineOf: (id) => runs.get(id)?.command.machine_id ?? records.machineOf(id),
    batches,
    follow: async (id, from, signal) => partsFrom(await sourceOf(id), from, signal),
    stop() {
      closed = true;
      runs.stop();
    },
    close: () => runs.close(),
    handlers: {
      ...creating(rooms, runs),
      ...listing(rooms, runs),
      ...steering(rooms, { records, runs }),
      get: (input) => recordOf(input.command_id, { records, runs }),
      async output(input, caller) {
        const source = await sourceOf(input.command_id);
        const { reply, from } = bytesOf(source, input, caller.signal);
        caller.headers.set('X-Output-Offset', String(from));
        return reply;
      },
      async stream(input, caller) {
        const from = offsetsIn(input.last_event_id);
        return eventsFrom(await sourceOf(input.command_id), from, caller.signal);
      },
    },
  };
}

/** Where both streams are after the event with this id. */
export function offsetsIn(id = '0.0'): Record<Stream, number> {
  const [stdout = 0, stderr = 0] = id.split('.').map(Number);
  return { stdout, stderr };
}

interface Known {
  records: Records;
  runs: Runs;
}

function creating(rooms: Rooms, runs: Runs): Pick<Handlers['commands'], 'create' | 'async'> {
  const create: Handlers['commands']['create'] = async (input, caller) => {
    refuseLocked(rooms, input.machine_id, input.user);
    const command = commandOf(input, caller);
    const also = (journal: Journal): void => caller.commit(journal, { command_id: command.id });
    const run = await runs.add(command, specOf(input), caller.request_id, also);
    await runs.ended(run, input.wait, caller.signal);
    return shown(await current(run));
  };
  return { create, async: (input, caller) => create({ ...input, wait: 0 }, caller) };
}

function listing({ history }: Rooms, runs: Runs): Pick<Handlers['commands'], 'list' | 'ofMachine'> {
  async function pageFor(
    route: typeof routes.list | typeof routes.ofMachine,
    input: Input<typeof routes.list> | Input<typeof routes.ofMachine>,
    caller: Caller,
  ): Promise<Page<CommandRecord>> {
    const filters = filtersOf(route, input, {
      stdout_truncated: truncatedIs('stdout', input.stdout_truncated),
      stderr_truncated: truncatedIs('stderr', input.stderr_truncated),
    });
    const page = pageOfRows(
      history,
      { table: 'commands', columns: columns },
      [reachableOnly(caller.reachable()), ...filters],
      input,
    );
    const items = page.items.map(async (row) => {
      const run = runs.get(textIn(row, 'id'));
      return listed(run ? await current(run, listedBytes) : fromRow(row));
    });
    return { items: await Promise.all(items), total: page.total };
  }
  return {
    list: (input, caller) => pageFor(routes.list, input, caller),
    ofMachine: (input, caller) => pageFor(routes.ofMachine, input, caller),
  };
}

/** Of the row: what a list has of each stream is its end. */
function truncatedIs(stream: Stream, wanted: boolean | undefined): Condition {
  return wanted === undefined ? undefined : [`(length(${stream}) < ${stream}_bytes) = ?`, Number(wanted)];
}

function steering(
  { presence }: Rooms,
  known: Known,
): Pick<Handlers['commands'], 'cancel' | 'purge' | 'input' | 'signal'> {
  const { runs, records } = known;

  /** A command that its machine has. Throws conflict for one that has ended or not begun. */
  function running(id: string): Run {
    const run = runs.get(id);
    if (!run) knownCommand(records, id);
    if (run && !run.end && !waits(run)) return run;
    const started = !(run && waits(run));
    throw new AppError('conflict', `this command ${started ? 'has ended' : 'has not started'}`, {
      command_id: id,
      started,
    });
  }

  return {
    async cancel({ command_id }, caller) {
      const run = runs.get(command_id);
      if (run) {
        await runs.cancel(run, caller);
        await runs.ended(run, cancelWaitMs);
      }
      return shownTo(caller, shown(run ? await current(run) : knownCommand(records, command_id)));
    },
    async purge({ machine_id }) {
      const waiting = runs.waitingFor(machine_id);
      await Promise.all(waiting.map((run) => runs.cancel(run)));
      return { cancelled: waiting.map(({ command }) => command.id) };
    },
    async input(input, caller) {
      const run = running(input.command_id);
      // One after another: the pieces of two callers must not come between each other.
      const turn = run.input.then(() => give(presence, run, input, caller));
      run.input = turn.catch(() => {});
      return { taken: await turn };
    },
    async signal({ command_id, signal }, caller) {
      const { machine_id } = running(command_id).command;
      const { stub } = presence.get(machine_id);
      await stub.signalProcess({ id: command_id, signal }, { request_id: caller.request_id, caller });
      return shownTo(caller, await recordOf(command_id, known));
    },
  };
}

/** Bytes of input taken in all. An error tells, as `given`, how many of these were. */
async function give(
  presence: Presence,
  run: Run,
  { data, encoding, offset, end }: Input<Api['commands']['input']>,
  caller: Caller,
): Promise<number> {
  const { id, machine_id } = run.command;
  const bytes = Buffer.from(data, encoding === 'base64' ? 'base64' : 'utf8');
  const options = { request_id: caller.request_id, caller, signal: caller.signal };
  for (let given = 0; ; ) {
    const piece = bytes.subarray(given, given + inputBytes);
    const last = given + piece.length === bytes.length;
    const at = offset === undefined ? {} : { offset: offset + given };
    try {
      const { stub } = presence.get(machine_id);
      const { taken } = await stub.writeInput({ id, data: piece, end: end && last, ...at }, options);
      given += piece.length;
      if (last) return taken;
    } catch (error) {
      if (!(error instanceof AppError)) throw error;
      const unknown = error.code === 'command_not_found';
      const code = unknown ? 'conflict' : error.code;
      const message = unknown ? 'this command has not started yet: try again' : error.message;
      const details = { ...error.details, given, ...(unknown && { started: false }) };
      throw new AppError(code, message, details, { cause: error });
    }
  }
}

async function recordOf(id: string, { records, runs }: Known) {
  const run = runs.get(id);
  return shown(run ? await current(run) : knownCommand(records, id));
}

function knownCommand(records: Records, id: string): Command {
  return known(records.find(id), id);
}

function known(command: Command | undefined, id: string): Command {
  if (command) return command;
  throw new AppError('command_not_found', 'no such command', { command_id: id });
}

// Commands over REST: accepted once, followed to their end, kept in history.
import type { Handlers } from '../../shared/api/index.ts';
import type { CommandId } from '../../shared/api/route.ts';
import { now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import { type History, textIn } from '../history.ts';
import type { Presence } from '../link/presence.ts';
import type { Vitals } from '../machines/vitals.ts';
import { pageOfRows, reachableOnly } from '../paging.ts';
import type { State } from '../state/index.ts';
import { type Command, fromRow, listColumns, listed, openRecords, shown } from './records.ts';
import { openRuns } from './runs.ts';

export interface Commands {
  handlers: Handlers['commands'];
  /** The machine a command belongs to. */
  machineOf(id: string): Command['machine_id'] | undefined;
  close(): void;
}

/** DELETE answers with the final record when the command dies within TERM's grace. */
const cancelWaitMs = 11_000;

/** Commands open at once on one machine. */
const maxOpen = 64;

export interface CommandRooms {
  state: State;
  history: History;
  events: Events;
  presence: Presence;
  vitals: Vitals;
}

/** Opens the room; finished commands older than `keepMs` go. */
export function openCommands(rooms: CommandRooms, keepMs: number, log: Logger): Commands {
  const { history, presence, vitals } = rooms;
  const records = openRecords(history, keepMs);
  const runs = openRuns({ ...rooms, records }, log);

  function find(id: string): Command {
    const command = runs.current(id) ?? records.find(id);
    if (!command) throw new AppError('command_not_found', 'no such command', { command_id: id });
    return command;
  }

  /** The owner's lock is known from hello: refuse before anything is stored. */
  function refuseLocked(machineId: string, user: string | undefined): void {
    const allowed = vitals.of(machineId)?.capabilities ?? [];
    const missing = ['exec', ...(user === undefined ? [] : ['user'])].find((one) => !allowed.includes(one));
    if (missing) {
      throw new AppError('permission_denied', `the owner of this machine does not allow ${missing}`, {
        machine_id: machineId,
        capability: missing,
      });
    }
  }

  function refuseFull(machineId: string): void {
    if (runs.openOn(machineId) < maxOpen) return;
    throw new AppError(
      'unavailable',
      `${maxOpen} commands are open on this machine already: try again later`,
      {
        machine_id: machineId,
        limit: maxOpen,
      },
    );
  }

  return {
    machineOf: (id) => (runs.current(id) ?? records.find(id))?.machine_id,
    close: () => runs.close(),
    handlers: {
      async create(input, caller) {
        const link = presence.get(input.machine_id);
        refuseLocked(input.machine_id, input.user);
        refuseFull(input.machine_id);
        const command: Command = {
          id: newId('command') as CommandId,
          machine_id: input.machine_id,
          command: input.command,
          args: input.args ?? null,
          cwd: input.cwd ?? null,
          user: input.user ?? null,
          status: 'queued',
          exit_code: null,
          signal: null,
          stdout: Buffer.alloc(0),
          stderr: Buffer.alloc(0),
          stdout_bytes: 0,
          stderr_bytes: 0,
          created_at: now(),
          started_at: null,
          finished_at: null,
          reason: null,
          requested_by: caller.key_id,
          journal_id: link.journalId,
          cancel: false,
        };
        const spec = {
          command: input.command,
          direct: input.args !== undefined,
          args: input.args ?? [],
          cwd: input.cwd ?? '',
          env: input.env ?? {},
          user: input.user ?? '',
          stdin: Buffer.from(input.stdin ?? ''),
          timeout_ms: input.timeout ?? 0,
        };
        await runs.start(command, spec, link, caller.request_id, (journal) =>
          caller.made(journal, command.id),
        );
        await runs.ended(command.id, input.wait);
        return shown(find(command.id));
      },
      list(input, caller) {
        const page = pageOfRows(
          history,
          { table: 'commands', columns: listColumns },
          [
            reachableOnly(caller.reachable()),
            input.machine_id && ['machine_id = ?', input.machine_id],
            input.status && ['status = ?', input.status],
            input.since && ['created_at >= ?', input.since.getTime()],
          ],
          input,
        );
        const items = page.items.map((row) => listed(runs.current(textIn(row, 'id')) ?? fromRow(row)));
        return { items, total: page.total };
      },
      get: (input) => shown(find(input.command_id)),
      async cancel(input) {
        find(input.command_id);
        await runs.cancel(input.command_id);
        await runs.ended(input.command_id, cancelWaitMs);
        return shown(find(input.command_id));
      },
    },
  };
}

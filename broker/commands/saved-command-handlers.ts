// REST handlers for saved commands.
import type { Api, Caller, Handlers, Input } from '../../shared/api/route-table.ts';
import { mostSavedCommands, savedCommands as routes } from '../../shared/api/saved-commands.ts';
import type { SavedCommandId } from '../../shared/api/shared-schemas.ts';
import { iso } from '../../shared/clock.ts';
import { definedFields } from '../../shared/defined-fields.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { found } from '../find-or-not-found.ts';
import { pageOf } from '../list-pages-and-filters.ts';
import type { SavedCommand, Schedule, State, StateTransaction } from '../state/index.ts';
import { assertParameters } from './saved-command-parameters.ts';

type Creation = Input<Api['savedCommands']['create']>;
type Parameter = SavedCommand['parameters'][number];

export function savedCommandHandlers(state: State): Handlers['savedCommands'] {
  return {
    create: async (input, caller) => {
      const at = iso();
      const { name, argv, description = null, user = null, cwd = null, timeout = null } = input;
      const parameters = (input.parameters ?? []).map(parameterOf);
      const id = newId('savedCommand') as SavedCommandId;
      const stamps = { updated_by: caller.key_id, created_at: at, updated_at: at };
      const made: SavedCommand = { id, name, argv, parameters, description, user, cwd, timeout, ...stamps };
      await state.change((transaction) => {
        const { saved_commands } = transaction.before;
        if (saved_commands.size >= mostSavedCommands) {
          const message = `there are ${mostSavedCommands} saved commands, the most allowed: delete some of them`;
          throw new AppError('conflict', message, { limit: mostSavedCommands });
        }
        assertUnlimited(caller);
        assertNameIsFree(made, saved_commands);
        assertParameters(made);
        transaction.put('saved_commands', made);
        caller.commit(transaction, { saved_command_id: id });
      });
      return made;
    },
    list: (input) => pageOf(routes.list, [...state.saved_commands.values()], input),
    get: ({ saved_command_id }) => found(state.saved_commands, 'saved_command', saved_command_id),
    update: ({ saved_command_id, parameters, ...changes }, caller) =>
      state.change((transaction) => {
        const { saved_commands } = transaction.before;
        const before = found(saved_commands, 'saved_command', saved_command_id);
        assertMayChange(before, transaction, caller);
        const after: SavedCommand = {
          ...{ ...before, ...definedFields(changes) },
          ...(parameters && { parameters: parameters.map(parameterOf) }),
          ...{ updated_by: caller.key_id, updated_at: iso() },
        };
        assertNameIsFree(after, saved_commands);
        assertParameters(after);
        transaction.put('saved_commands', after);
        caller.commit(transaction);
        return after;
      }),
    remove: async ({ saved_command_id: id }, caller) => {
      await state.change((transaction) => {
        const saved = found(transaction.before.saved_commands, 'saved_command', id);
        assertMayChange(saved, transaction, caller);
        const users = schedulesWith(saved, transaction);
        if (users.length > 0) {
          const schedules = users.map((one) => one.id);
          const count = users.length === 1 ? '1 schedule uses' : `${users.length} schedules use`;
          const message = `${count} this saved command: change or delete the schedules in details.schedules first`;
          throw new AppError('conflict', message, { schedules: schedules.slice(0, 100) });
        }
        transaction.remove('saved_commands', saved.id);
        caller.commit(transaction);
      });
      return { deleted: true };
    },
  };
}

function parameterOf(given: NonNullable<Creation['parameters']>[number]): Parameter {
  const { name, type, values = null, pattern = null, min = null, max = null, description = null } = given;
  const byDefault = given.default ?? null;
  const required = given.required ?? byDefault === null;
  return { name, type, required, default: byDefault, values, pattern, min, max, description };
}

/**
 * Throws forbidden for a key that is limited to some machines. Otherwise such a key could write a command that other
 * keys and schedules then run on any machine.
 */
function assertUnlimited(caller: Caller): void {
  if (!caller.reachable()) return;
  const message =
    'a saved command can run on all machines, so a key limited to some of them cannot create, change or delete it: use a key without machine_ids and tags';
  throw new AppError('forbidden', message);
}

const schedulesWith = ({ id }: SavedCommand, transaction: StateTransaction): Schedule[] =>
  transaction.all('schedules').filter((one) => one.saved_command_id === id);

/**
 * Throws forbidden for a key that is limited to some machines, or that lacks rights to the schedules that run the saved
 * command.
 */
function assertMayChange(saved: SavedCommand, transaction: StateTransaction, caller: Caller): void {
  assertUnlimited(caller);
  const { may } = caller.during(transaction);
  // If schedules run the command, the key needs these scopes. Without them, a key could make the command print a
  // schedule's secret environment variables.
  const needed = ['schedules:write', 'schedules:read'] as const;
  const required_scope = needed.find((scope) => !may(scope));
  if (required_scope === undefined || schedulesWith(saved, transaction).length === 0) return;
  const message = `schedules run the saved command ${saved.name}: to change or delete this command, a key also needs the scope ${required_scope}`;
  throw new AppError('forbidden', message, { required_scope });
}

function assertNameIsFree({ id, name }: SavedCommand, others: ReadonlyMap<string, SavedCommand>): void {
  if ([...others.values()].some((one) => one.name === name && one.id !== id))
    throw new AppError('conflict', `another saved command is named ${name}: choose another name`, { name });
}

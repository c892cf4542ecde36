// REST route of live updates: changes of machines, events, commands and batches in one stream.
import * as z from 'zod';
import { batch } from './batches.ts';
import { command } from './commands.ts';
import { outgoing } from './define-route.ts';
import { event } from './events.ts';
import { liveMachine } from './machines.ts';
import { commandId, machineId, named, parsedText } from './shared-schemas.ts';

const kinds = ['machines', 'events', 'commands', 'batches'] as const;
const mostTopics = 20;

/** What a client follows: all machines, all events, all commands, or one command or batch. */
export interface Topic {
  kind: (typeof kinds)[number];
  id: string;
}

function topicOf(text: string): Topic | undefined {
  const [, kind, id = ''] =
    /^(machines|events|commands|batches)(?::([A-Za-z0-9_]{1,200}))?$/.exec(text) ?? [];
  const found = kinds.find((one) => one === kind);
  const fits = found === 'commands' || (found === 'batches') === (id !== '');
  return found && fits ? { kind: found, id } : undefined;
}

/** Returns the topics of a comma-separated text, each once; undefined if one is unknown or there are too many. */
function topicsIn(text: string): Topic[] | undefined {
  const named = text.split(',').map((one) => one.trim());
  const known = [...new Set(named)].map(topicOf);
  if (named.length > mostTopics || known.includes(undefined)) return undefined;
  return known.filter((one) => one !== undefined);
}

const topics = parsedText(
  4096,
  topicsIn,
  `must be a comma-separated list of at most ${mostTopics} topics: machines, events, commands, commands:ID or batches:ID`,
);

const update = named('LiveUpdate', {
  machines: z
    .array(liveMachine)
    .optional()
    .describe('In the event `machines`: the machines that changed or were added'),
  removed: z
    .array(machineId)
    .optional()
    .describe(
      'In the event `machines`: ids of machines that were removed, or that the key may no longer use',
    ),
  event: event.optional().describe('In the event `event`: an entry of the event log'),
  commands: z
    .array(commandId)
    .optional()
    .describe(
      'In the event `commands`: ids of the commands that were created, started or ended. If there are many, the list has only the ids of those that changed last',
    ),
  command: command
    .optional()
    .describe(
      'In the event `command`: the current state of the command, with the same fields as in an answer that lists commands',
    ),
  batch: batch.optional().describe('In the event `batch`: the current state of the batch'),
});

export const live = {
  follow: outgoing('events', '/live', 'any key', {
    summary: 'Follow machines, events, commands and batches in one stream',
    description:
      'Events: `ready` first, then `machines` and `commands` (at most once a second), `event`, `command` and `batch`. The topics `machines` and `events` need the scope `machines:read`, the others `commands:read`. Load your data whenever `ready` arrives, also after a reconnect: earlier changes are not sent.',
    query: {
      topics: topics.describe(
        'What to follow, comma-separated: `machines`, `events`, `commands`, `commands:ID` of one command, `batches:ID` of one batch',
      ),
    },
    reply: update,
    errors: ['command_not_found', 'batch_not_found'],
  }),
};

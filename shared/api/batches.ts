// REST routes of batches: one command on many machines.
import * as z from 'zod';
import { command, exit, outputGap, outputPiece, requestedBy, spec, wait } from './commands.ts';
import { list } from './define-list-route.ts';
import { inPieces, outgoing, single } from './define-route.ts';
import { parameterValues } from './saved-commands.ts';
import { batchId, commandId, machineId, named, queryNumber, tagList, timestamp } from './shared-schemas.ts';

export const mostMachines = 10_000;
/**
 * Maximum number of characters of args, env and stdin together, as JSON. The limit is low because each machine gets a
 * copy.
 */
export const mostInput = 64 * 1024;

const limit = z.int().max(mostMachines);
const counts = z.object({
  queued: z.number().describe('Machines whose command has not started yet'),
  running: z.number().describe('Machines whose command runs'),
  completed: z.number().describe('Machines whose command ended with exit code 0'),
  failed: z.number().describe('Machines whose command failed or could not start'),
  timeout: z.number().describe('Machines whose command was killed at its timeout'),
  cancelled: z.number().describe('Machines whose command was cancelled'),
  expired: z.number().describe('Machines whose command expired before it started'),
  lost: z.number().describe('Machines whose command has an unknown outcome'),
});

const mostFailures =
  'If the command fails on more machines than this number, it starts on no further machine';
const status = z.enum(['running', 'completed', 'failed', 'cancelled']);
export const batch = named('Batch', {
  id: batchId,
  status: status.describe(
    '`completed`: the command succeeded on every machine; `failed`: on at least one machine it failed or did not run',
  ),
  ...command.pick({ command: true, args: true, cwd: true, user: true }).shape,
  concurrency: z
    .number()
    .nullable()
    .describe('Maximum number of machines that run the command at the same time; null: all'),
  max_failures: z.number().nullable().describe(`${mostFailures}; null: no limit`),
  total: z.number().describe('Number of machines of the batch'),
  counts: counts.describe('Number of machines by status of their command'),
  created_at: timestamp.describe('Time of creation'),
  finished_at: timestamp.nullable().describe('Time when the command ended on the last machine'),
  requested_by: requestedBy,
});

export const mostFollowed = 1_000;
const ofMember = { command_id: commandId, machine_id: machineId };

const result = command.omit({ command: true, args: true, cwd: true, user: true });
const results = z
  .array(result)
  .describe('The command of each machine, with at most the last 4 KiB of each output');
const withResults = batch.extend({ results }).meta({ id: 'BatchWithResults' });

/** Fields of a request that select its machines, either by their ids or by their tags. */
export const target = {
  machine_ids: z.array(machineId).min(1).max(mostMachines).optional().describe('Ids of the machines'),
  // An empty list would select every machine, so at least one tag is required.
  tags: tagList(1).optional().describe('Select every machine that has all of these tags'),
};
export const namesOne = (body: { machine_ids?: unknown; tags?: unknown }): boolean =>
  (body.machine_ids === undefined) !== (body.tags === undefined);
export const mustNameOne = 'name exactly one of machine_ids and tags';
const limits = {
  concurrency: limit
    .min(1)
    .optional()
    .describe('Maximum number of machines that run the command at the same time; default: all'),
  max_failures: limit.min(0).optional().describe(`${mostFailures}; default: no limit`),
};

export const batches = {
  create: single('POST', '/commands/batch', 'commands:execute', {
    summary: 'Run a command on many machines and wait for it',
    description:
      'Takes either `machine_ids` or `tags`. On an offline machine the command fails unless `queue_for` is set.',
    body: z
      .strictObject({
        ...target,
        ...spec,
        ...limits,
        wait,
      })
      .refine(namesOne, mustNameOne)
      .refine(
        ({ args = [], env = {}, stdin = '' }) => JSON.stringify([args, env, stdin]).length <= mostInput,
        'args, env and stdin of a batch must not exceed 64 KiB together; upload longer input as a file, and let the command read that file',
      ),
    example: { tags: ['web'], command: 'uptime', concurrency: 10, max_failures: 2 },
    ...inPieces(withResults, 'results'),
    status: 201,
    idempotency: 'replay',
    waits: true,
  }),
  runSaved: single('POST', '/saved-commands/{saved_command_id}/run', 'commands:execute', {
    summary: 'Run a saved command on machines and wait for it',
    description:
      'Takes either `machine_ids` or `tags`. Runs as a batch, with the rights of the key of this request.',
    body: z
      .strictObject({
        ...target,
        parameters: parameterValues.optional(),
        ...limits,
        ...{ timeout: spec.timeout, queue_for: spec.queue_for, wait },
      })
      .refine(namesOne, mustNameOne),
    example: { tags: ['web'], parameters: { unit: 'nginx' } },
    ...inPieces(withResults, 'results'),
    status: 201,
    idempotency: 'replay',
    waits: true,
  }),
  list: list('/batches', 'commands:read', {
    summary: 'List batches',
    query: { machine_id: machineId.optional().describe('Only batches that include this machine') },
    sort: ['created_at'],
    reply: batch,
  }),
  get: single('GET', '/batches/{batch_id}', 'commands:read', {
    summary: 'Get a batch and its results',
    ...inPieces(withResults, 'results'),
  }),
  stream: outgoing('events', '/batches/{batch_id}/stream', 'commands:read', {
    summary: 'Follow the output of all commands of a batch, and its end, in one stream',
    description: `Events: \`output\`, \`gap\` and \`exit\` as for a single command, and \`end\` as the last one. Only for batches of at most ${mostFollowed} machines. After a reconnect, the stream repeats earlier output: a client recognizes it by its \`offset\`.`,
    query: {
      tail: queryNumber(0, 64 * 1024 * 1024)
        .default(64 * 1024)
        .describe(
          'How many bytes of earlier output are sent first, for each output of each command; older bytes are left out',
        ),
    },
    reply: z.union([
      z.object({ ...ofMember, ...outputPiece.shape }),
      z.object({ ...ofMember, ...outputGap.shape }),
      z.object({ ...ofMember, ...exit.shape }),
      batch,
    ]),
    errors: ['conflict'],
    lastEvent: 'end',
  }),
  cancel: single('DELETE', '/batches/{batch_id}', 'commands:execute', {
    summary: 'Cancel a batch',
    description:
      'Commands that have not started are not run. Running commands are killed with all their processes.',
    ...inPieces(withResults, 'results'),
  }),
};

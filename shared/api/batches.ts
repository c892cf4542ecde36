// One command on many machines (batches).
import * as z from 'zod';
import { command, spec, wait } from './commands.ts';
import { list } from './list.ts';
import { batchId, machineId, single, tagList, timestamp } from './route.ts';

export const mostMachines = 10_000;
/** Characters as JSON. Each machine gets all of it: what is larger is uploaded first. */
const mostBeside = 64 * 1024;

const counts = z.object({
  queued: z.number(),
  running: z.number(),
  completed: z.number(),
  failed: z.number(),
  timeout: z.number(),
  cancelled: z.number(),
  expired: z.number(),
  lost: z.number(),
});

const batch = z
  .object({
    id: batchId,
    status: z
      .enum(['running', 'completed', 'failed', 'cancelled'])
      .describe('completed: on every machine; failed: not on all of them'),
    command: z.string(),
    args: z.array(z.string()).nullable(),
    cwd: z.string().nullable(),
    user: z.string().nullable(),
    concurrency: z.number().nullable(),
    max_failures: z.number().nullable(),
    total: z.number().describe('Machines'),
    counts: counts.describe('Machines by status'),
    created_at: timestamp,
    finished_at: timestamp.nullable(),
    requested_by: z.string().nullable().describe('Id of the key'),
  })
  .meta({ id: 'Batch' });

const withResults = batch
  .extend({
    results: z
      .array(command.omit({ command: true, args: true, cwd: true, user: true }))
      .describe('The command on each machine, with the last 4 KiB of its output, or a share of 8 MiB'),
  })
  .meta({ id: 'BatchWithResults' });

export const batches = {
  create: single('POST', '/commands/batch', 'commands:execute', {
    summary: 'Run a command on many machines and wait for it',
    body: z
      .strictObject({
        machine_ids: z.array(machineId).min(1).max(mostMachines).optional(),
        // None at all would mean every machine there is: too much for a slip.
        tags: tagList(1).optional().describe('Every machine that has all of these'),
        ...spec,
        concurrency: z
          .int()
          .min(1)
          .max(mostMachines)
          .optional()
          .describe('Machines at once; all of them without it'),
        max_failures: z
          .int()
          .min(0)
          .max(mostMachines)
          .optional()
          .describe('When more than so many did not complete, no further machine starts'),
        wait,
      })
      .refine(
        (body) => (body.machine_ids === undefined) !== (body.tags === undefined),
        'name either machine_ids or tags, not both',
      )
      .refine(
        ({ args = [], env = {}, stdin = '' }) => JSON.stringify([args, env, stdin]).length <= mostBeside,
        'args, env and stdin of a batch must not exceed 64 KiB together: upload a file first, and let the command read it',
      ),
    reply: withResults,
    status: 201,
    idempotency: 'replay',
    waits: true,
  }),
  list: list('/batches', 'commands:read', {
    summary: 'List batches',
    query: { machine_id: machineId.optional().describe('Those that have this machine') },
    sort: ['created_at'],
    reply: batch,
  }),
  get: single('GET', '/batches/{batch_id}', 'commands:read', {
    summary: 'Get a batch and its results',
    reply: withResults,
  }),
  cancel: single('DELETE', '/batches/{batch_id}', 'commands:execute', {
    summary: 'Cancel a batch: what waits never runs, what runs is ended with its process tree',
    reply: withResults,
  }),
};

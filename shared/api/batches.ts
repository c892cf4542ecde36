// One command on many machines (batches).
import * as z from 'zod';
import { command, spec, wait } from './commands.ts';
import { list } from './list.ts';
import { batchId, machineId, single, tags, timestamp } from './route.ts';

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
      .meta({ description: 'completed: on every machine; failed: not on all of them' }),
    command: z.string(),
    args: z.array(z.string()).nullable(),
    cwd: z.string().nullable(),
    user: z.string().nullable(),
    concurrency: z.number().nullable(),
    max_failures: z.number().nullable(),
    total: z.number().meta({ description: 'Machines' }),
    counts: counts.meta({ description: 'Machines by status' }),
    created_at: timestamp,
    finished_at: timestamp.nullable(),
    requested_by: z.string().nullable().meta({ description: 'Id of the key' }),
  })
  .meta({ id: 'Batch' });

const withResults = batch
  .extend({
    results: z.array(command.omit({ command: true, args: true, cwd: true, user: true })).meta({
      description: 'The command on each machine, with the last 4 KiB of its output, or a share of 8 MiB',
    }),
  })
  .meta({ id: 'BatchWithResults' });

export const batches = {
  create: single({
    method: 'POST',
    path: '/commands/batch',
    access: 'commands:execute',
    summary: 'Run a command on many machines and wait for it',
    body: z
      .strictObject({
        machine_ids: z.array(machineId).min(1).max(mostMachines).optional(),
        // None at all would mean every machine there is: too much for a slip.
        tags: tags
          .refine((all) => all.length > 0, 'name at least one tag')
          .optional()
          .meta({ description: 'Every machine that has all of these' }),
        ...spec,
        concurrency: z
          .int()
          .min(1)
          .max(mostMachines)
          .optional()
          .meta({ description: 'Machines at once; all of them without it' }),
        max_failures: z
          .int()
          .min(0)
          .max(mostMachines)
          .optional()
          .meta({ description: 'When more than so many did not complete, no further machine starts' }),
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
  list: list({
    path: '/batches',
    access: 'commands:read',
    summary: 'List batches',
    query: { machine_id: machineId.optional().meta({ description: 'Those that have this machine' }) },
    sort: ['created_at'],
    defaultSort: '-created_at',
    reply: batch,
  }),
  get: single({
    method: 'GET',
    path: '/batches/{batch_id}',
    access: 'commands:read',
    summary: 'Get a batch and its results',
    params: { batch_id: batchId },
    reply: withResults,
  }),
  cancel: single({
    method: 'DELETE',
    path: '/batches/{batch_id}',
    access: 'commands:execute',
    summary: 'Cancel a batch: what waits never runs, what runs is ended with its process tree',
    params: { batch_id: batchId },
    reply: withResults,
  }),
};

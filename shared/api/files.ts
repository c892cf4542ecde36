// Files on a machine over REST (spec 2.4, 2.5, 4.2).
import { z } from 'zod';
import { machineId, mode, path, queryBoolean, queryNumber, single, timestamp } from './route.ts';

const entry = z
  .object({
    name: z.string(),
    path: z.string(),
    type: z.enum(['file', 'directory']).meta({ description: 'Of a symlink: its target’s' }),
    size: z.number().optional().meta({ description: 'Bytes; absent for directories' }),
    mode: z.string().meta({ examples: ['0644'] }),
    setuid: z.boolean().optional(),
    setgid: z.boolean().optional(),
    sticky: z.boolean().optional(),
    owner: z.string(),
    group: z.string(),
    modified_at: timestamp,
    link_target: z.string().optional(),
    special: z.enum(['fifo', 'socket', 'block', 'char']).optional(),
    name_encoding: z
      .literal('base64')
      .optional()
      .meta({ description: 'name, path and link_target are base64' }),
  })
  .meta({ id: 'FileEntry' });

const params = { machine_id: machineId };
const pathEncoding = z.literal('base64').optional().meta({ description: 'For a path that is not UTF-8' });

export const files = {
  list: single({
    method: 'GET',
    path: '/machines/{machine_id}/files',
    access: 'files:read',
    summary: 'List a directory, directories first, then by name',
    params,
    query: {
      path: path.optional(),
      path_encoding: pathEncoding,
      hidden: queryBoolean.optional(),
      limit: queryNumber(1, 10_000).optional(),
      offset: queryNumber(0, 1e9).optional(),
    },
    reply: z
      .object({
        path: z.string(),
        path_encoding: z.literal('base64').optional(),
        files: z.array(entry),
        total: z.number(),
        has_more: z.boolean(),
      })
      .meta({ id: 'Listing' }),
  }),
  read: single({
    method: 'GET',
    path: '/machines/{machine_id}/files/content',
    access: 'files:read',
    summary: 'Read a file as text, or as base64 where it is not UTF-8',
    params,
    query: {
      path,
      path_encoding: pathEncoding,
      encoding: z.enum(['utf-8', 'base64']).optional(),
      offset: queryNumber(
        Number.MIN_SAFE_INTEGER,
        Number.MAX_SAFE_INTEGER,
        'First byte; negative counts from the end',
      ).optional(),
      length: queryNumber(0, Number.MAX_SAFE_INTEGER).optional(),
    },
    reply: z
      .object({
        path: z.string(),
        content: z.string(),
        size: z.number(),
        encoding: z.enum(['utf-8', 'base64']),
      })
      .meta({ id: 'FileContent' }),
  }),
  write: single({
    method: 'PUT',
    path: '/machines/{machine_id}/files/content',
    access: 'files:write',
    summary: 'Write a file atomically',
    params,
    headers: { if_match: z.string().max(1000).optional() },
    body: z
      .strictObject({
        path,
        path_encoding: pathEncoding,
        content: z.string(),
        encoding: z.enum(['utf-8', 'base64']).default('utf-8'),
        mode: mode.optional(),
        create_parents: z.boolean().default(false),
      })
      .refine((body) => body.encoding === 'base64' || body.content.isWellFormed(), {
        path: ['content'],
        message: 'must be well-formed Unicode; send other bytes as base64',
      })
      .refine((body) => body.encoding !== 'base64' || z.base64().safeParse(body.content).success, {
        path: ['content'],
        message: 'must be base64',
      }),
    reply: z.object({ path: z.string(), size: z.number(), created: z.boolean() }).meta({ id: 'FileWritten' }),
    bodyLimit: 16 * 1024 * 1024,
  }),
};

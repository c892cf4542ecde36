// Files on a machine over REST (spec 2.4, 2.5, 4.2).
import * as z from 'zod';
import {
  growing,
  incoming,
  machineId,
  mode,
  outgoing,
  path,
  queryBoolean,
  queryNumber,
  single,
  someOf,
  timestamp,
} from './route.ts';

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

const sha256 = z.string().meta({ description: 'Hexadecimal' });
const pathEncoding = z.literal('base64').optional().meta({ description: 'For a path that is not UTF-8' });
const givenPath = { path: z.string(), path_encoding: pathEncoding };
const askedPath = { path, path_encoding: pathEncoding };

/** A route of one machine, and for the spec's unprefixed forms where the machine is named in the query. */
const prefixed = '/machines/{machine_id}/files' as const;
const params = { machine_id: machineId };
const anywhere = {
  machine_id: machineId.optional().meta({ description: 'May be left out while one machine is registered' }),
};

const listing = {
  access: 'files:read',
  summary: 'List a directory, directories first, then by name',
  grows: 'files',
  reply: z.object({ ...givenPath, files: z.array(entry) }).meta({ id: 'Listing' }),
} as const;
const listed = {
  path: path.optional(),
  path_encoding: pathEncoding,
  hidden: queryBoolean.optional(),
  limit: queryNumber(1, 10_000).optional(),
  offset: queryNumber(0, 1e9).optional(),
};

const reading = {
  method: 'GET',
  access: 'files:read',
  summary: 'Read a file as text, or as base64 where it is not UTF-8',
  reply: z
    .object({
      ...givenPath,
      content: z.string(),
      size: z.number(),
      encoding: z.enum(['utf-8', 'base64']),
    })
    .meta({ id: 'FileContent' }),
  waits: true,
} as const;
const whole = { min: Number.MIN_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER };
const readPart = {
  ...askedPath,
  encoding: z.enum(['utf-8', 'base64']).optional(),
  offset: queryNumber(whole.min, whole.max, 'First byte; negative counts from the end').optional(),
  length: queryNumber(0, whole.max).optional(),
};

const ifMatch = { if_match: z.string().max(1000).optional() };
const writing = {
  method: 'PUT',
  access: 'files:write',
  summary: 'Write a file atomically',
  headers: ifMatch,
  reply: z.object({ ...givenPath, size: z.number(), created: z.boolean() }).meta({ id: 'FileWritten' }),
  bodyLimit: 16 * 1024 * 1024,
  waits: true,
} as const;
const content = {
  ...askedPath,
  content: z.string(),
  encoding: z.enum(['utf-8', 'base64']).default('utf-8'),
  mode: mode.optional(),
  create_parents: z.boolean().default(false),
};

/** Text must be text, and base64 must be base64. */
function sound<T extends z.ZodType<{ content: string; encoding: 'utf-8' | 'base64' }>>(body: T) {
  return body
    .refine((given) => given.encoding === 'base64' || given.content.isWellFormed(), {
      path: ['content'],
      message: 'must be well-formed Unicode; send other bytes as base64',
    })
    .refine((given) => given.encoding !== 'base64' || z.base64().safeParse(given.content).success, {
      path: ['content'],
      message: 'must be base64',
    });
}

const removing = {
  method: 'DELETE',
  access: 'files:write',
  summary: 'Delete a file, a symlink (never its target) or a directory',
  reply: z.object({ ...givenPath, deleted: z.literal(true) }).meta({ id: 'FileDeleted' }),
  waits: true,
} as const;
const removed = { ...askedPath, recursive: queryBoolean.default(false) };

const uploaded = z
  .object({ ...givenPath, size: z.number(), created: z.boolean(), sha256 })
  .meta({ id: 'FileUploaded' });
/** From one name to another. */
const fromTo = {
  source: path,
  source_encoding: pathEncoding,
  destination: path,
  destination_encoding: pathEncoding,
  overwrite: z.boolean().default(false),
};
const replacing = queryBoolean
  .default(true)
  .meta({ description: 'false: an existing file is already_exists' });

export const files = {
  list: growing({ ...listing, path: prefixed, params, query: listed }),
  listAnywhere: growing({
    ...listing,
    impliesMachine: true,
    path: '/files',
    query: { ...anywhere, ...listed },
  }),
  read: single({ ...reading, path: `${prefixed}/content`, params, query: readPart }),
  readAnywhere: single({
    ...reading,
    impliesMachine: true,
    path: '/files/content',
    query: { ...anywhere, ...readPart },
  }),
  write: single({ ...writing, path: `${prefixed}/content`, params, body: sound(z.strictObject(content)) }),
  writeAnywhere: single({
    ...writing,
    impliesMachine: true,
    path: '/files/content',
    query: anywhere,
    body: sound(z.strictObject({ ...anywhere, ...content })),
  }),
  remove: single({ ...removing, path: prefixed, params, query: removed }),
  removeAnywhere: single({
    ...removing,
    impliesMachine: true,
    path: '/files',
    query: { ...anywhere, ...removed },
  }),

  stat: single({
    method: 'GET',
    path: `${prefixed}/stat`,
    access: 'files:read',
    summary: 'Describe one path, on request with the checksum of its bytes',
    params,
    query: { ...askedPath, checksum: z.literal('sha256').optional() },
    reply: entry.extend({ sha256: sha256.optional() }).meta({ id: 'FileStat' }),
    waits: true,
  }),
  change: single({
    method: 'PATCH',
    path: prefixed,
    access: 'files:write',
    summary: 'Change mode, owner or group',
    params,
    body: someOf(
      z.strictObject({
        ...askedPath,
        mode: mode.optional(),
        owner: z.string().min(1).max(100).optional().meta({ description: 'A name or a number' }),
        group: z.string().min(1).max(100).optional().meta({ description: 'A name or a number' }),
      }),
      ['mode', 'owner', 'group'],
    ),
    reply: entry,
  }),
  mkdir: single({
    method: 'POST',
    path: `${prefixed}/mkdir`,
    access: 'files:write',
    summary: 'Make a directory',
    params,
    body: z.strictObject({ ...askedPath, mode: mode.optional(), parents: z.boolean().default(false) }),
    reply: entry,
    status: 201,
    idempotency: 'replay',
  }),
  move: single({
    method: 'POST',
    path: `${prefixed}/move`,
    access: 'files:write',
    summary: 'Move or rename a file or directory, also to another file system',
    params,
    body: z.strictObject(fromTo),
    reply: entry,
    idempotency: 'replay',
    waits: true,
  }),
  copy: single({
    method: 'POST',
    path: `${prefixed}/copy`,
    access: 'files:write',
    summary: 'Copy a file or directory, also to another machine',
    params,
    body: z.strictObject({ ...fromTo, destination_machine_id: machineId.optional() }),
    reply: entry.extend({ files_copied: z.number(), bytes_copied: z.number() }).meta({ id: 'FileCopied' }),
    status: 201,
    idempotency: 'replay',
    waits: true,
  }),

  upload: incoming({
    accepts: 'form',
    method: 'POST',
    path: `${prefixed}/upload`,
    access: 'files:write',
    summary: 'Upload a file as a form; it streams to the machine where path comes before the file',
    params,
    query: { path: path.optional(), path_encoding: pathEncoding },
    body: z.strictObject({
      path: path.optional(),
      path_encoding: pathEncoding,
      mode: mode.optional(),
      overwrite: replacing,
      create_parents: queryBoolean.default(false),
    }),
    reply: uploaded,
    status: 201,
    idempotency: 'replay',
  }),
  put: incoming({
    accepts: 'bytes',
    method: 'PUT',
    path: `${prefixed}/raw`,
    access: 'files:write',
    summary: 'Upload a file as the plain body',
    params,
    query: {
      ...askedPath,
      mode: mode.optional(),
      overwrite: replacing,
      create_parents: queryBoolean.default(false),
    },
    headers: ifMatch,
    reply: uploaded,
  }),
  extract: incoming({
    accepts: 'bytes',
    method: 'POST',
    path: `${prefixed}/extract`,
    access: 'files:write',
    summary: 'Unpack a tar or tar.gz into a directory',
    params,
    query: { ...askedPath, overwrite: replacing, create_parents: queryBoolean.default(false) },
    reply: z
      .object({ ...givenPath, files: z.number(), bytes: z.number(), sha256 })
      .meta({ id: 'ArchiveExtracted' }),
    status: 201,
    idempotency: 'replay',
  }),

  download: outgoing('bytes', {
    path: `${prefixed}/download`,
    access: 'files:read',
    summary: 'Download a file, or a directory as a tar',
    params,
    query: {
      ...askedPath,
      offset: readPart.offset,
      length: readPart.length,
      archive: z.enum(['tar', 'tar.gz']).optional().meta({ description: 'For a directory' }),
    },
    headers: {
      range: z.string().max(1000).optional(),
      if_range: z.string().max(1000).optional(),
      if_match: z.string().max(1000).optional(),
      if_none_match: z.string().max(1000).optional(),
      if_modified_since: z.string().max(100).optional(),
      if_unmodified_since: z.string().max(100).optional(),
    },
  }),
  search: outgoing('lines', {
    path: `${prefixed}/search`,
    access: 'files:read',
    summary: 'Search below a directory by name and by text; the last line says whether that is all',
    params,
    query: {
      path: path.optional(),
      path_encoding: pathEncoding,
      name: z
        .string()
        .min(1)
        .max(1000)
        .optional()
        .meta({ description: 'A glob; with a slash over the whole path' }),
      content: z.string().min(1).max(1000).optional().meta({ description: 'Text that a line must hold' }),
      ignore_case: queryBoolean.default(false),
      hidden: queryBoolean.default(false),
      limit: queryNumber(1, 10_000, 'Matches at most').default(1_000),
    },
    reply: z
      .union([
        z.object({ entry, line: z.number().optional(), text: z.string().optional() }),
        z.object({
          end: z.object({
            matches: z.number(),
            truncated: z.boolean(),
            visited: z.number(),
            unreadable: z.number(),
          }),
        }),
      ])
      .meta({ id: 'SearchLine' }),
  }),
  watch: outgoing('events', {
    path: `${prefixed}/watch`,
    access: 'files:read',
    summary: 'Watch a path: ready, then change events; overflow means that changes were lost, list anew',
    params,
    query: {
      path: path.optional(),
      path_encoding: pathEncoding,
      recursive: queryBoolean.default(false),
    },
    reply: z
      .object({
        ...givenPath,
        kind: z.enum(['added', 'changed', 'removed']).optional(),
        type: z.enum(['file', 'directory']).optional(),
      })
      .meta({ id: 'FileChange' }),
  }),
};

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
    type: z.enum(['file', 'directory']).describe('Of a symlink: its target’s'),
    size: z.number().optional().describe('Bytes; absent for directories'),
    mode: z.string().meta({ examples: ['0644'] }),
    setuid: z.boolean().optional(),
    setgid: z.boolean().optional(),
    sticky: z.boolean().optional(),
    owner: z.string(),
    group: z.string(),
    modified_at: timestamp,
    link_target: z.string().optional(),
    special: z.enum(['fifo', 'socket', 'block', 'char']).optional(),
    name_encoding: z.literal('base64').optional().describe('name, path and link_target are base64'),
  })
  .meta({ id: 'FileEntry' });

const sha256 = z.string().describe('Hexadecimal');
const pathEncoding = z.literal('base64').optional().describe('For a path that is not UTF-8');
const givenPath = { path: z.string(), path_encoding: pathEncoding };
const askedPath = { path, path_encoding: pathEncoding };

/** A route of one machine, and for the spec's unprefixed forms where the machine is named in the query. */
const prefixed = '/machines/{machine_id}/files' as const;
const anywhere = {
  machine_id: machineId.optional().describe('May be left out while one machine is registered'),
};
const implied = { impliesMachine: true } as const;

const listing = {
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
const readPart = {
  ...askedPath,
  encoding: z.enum(['utf-8', 'base64']).optional(),
  offset: queryNumber(Number.MIN_SAFE_INTEGER)
    .optional()
    .describe('First byte; negative counts from the end'),
  length: queryNumber(0).optional(),
};

const ifMatch = { if_match: z.string().max(1000).optional() };
const writing = {
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
const replacing = queryBoolean.default(true).describe('false: an existing file is already_exists');

export const files = {
  list: growing(prefixed, 'files:read', { ...listing, query: listed }),
  listAnywhere: growing('/files', 'files:read', {
    ...listing,
    ...implied,
    query: { ...anywhere, ...listed },
  }),
  read: single('GET', `${prefixed}/content`, 'files:read', { ...reading, query: readPart }),
  readAnywhere: single('GET', '/files/content', 'files:read', {
    ...reading,
    ...implied,
    query: { ...anywhere, ...readPart },
  }),
  write: single('PUT', `${prefixed}/content`, 'files:write', {
    ...writing,
    body: sound(z.strictObject(content)),
  }),
  writeAnywhere: single('PUT', '/files/content', 'files:write', {
    ...writing,
    ...implied,
    query: anywhere,
    body: sound(z.strictObject({ ...anywhere, ...content })),
  }),
  remove: single('DELETE', prefixed, 'files:write', { ...removing, query: removed }),
  removeAnywhere: single('DELETE', '/files', 'files:write', {
    ...removing,
    ...implied,
    query: { ...anywhere, ...removed },
  }),

  stat: single('GET', `${prefixed}/stat`, 'files:read', {
    summary: 'Describe one path, on request with the checksum of its bytes',
    query: { ...askedPath, checksum: z.literal('sha256').optional() },
    reply: entry.extend({ sha256: sha256.optional() }).meta({ id: 'FileStat' }),
    waits: true,
  }),
  change: single('PATCH', prefixed, 'files:write', {
    summary: 'Change mode, owner or group',
    body: someOf(
      z.strictObject({
        ...askedPath,
        mode: mode.optional(),
        owner: z.string().min(1).max(100).optional().describe('A name or a number'),
        group: z.string().min(1).max(100).optional().describe('A name or a number'),
      }),
      ['mode', 'owner', 'group'],
    ),
    reply: entry,
  }),
  mkdir: single('POST', `${prefixed}/mkdir`, 'files:write', {
    summary: 'Make a directory',
    body: z.strictObject({ ...askedPath, mode: mode.optional(), parents: z.boolean().default(false) }),
    reply: entry,
    status: 201,
    idempotency: 'replay',
  }),
  move: single('POST', `${prefixed}/move`, 'files:write', {
    summary: 'Move or rename a file or directory, also to another file system',
    body: z.strictObject(fromTo),
    reply: entry,
    idempotency: 'replay',
    waits: true,
  }),
  copy: single('POST', `${prefixed}/copy`, 'files:write', {
    summary: 'Copy a file or directory, also to another machine',
    body: z.strictObject({ ...fromTo, destination_machine_id: machineId.optional() }),
    reply: entry.extend({ files_copied: z.number(), bytes_copied: z.number() }).meta({ id: 'FileCopied' }),
    status: 201,
    idempotency: 'replay',
    waits: true,
  }),

  upload: incoming('form', 'POST', `${prefixed}/upload`, 'files:write', {
    summary: 'Upload a file as a form; it streams to the machine where path comes before the file',
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
  put: incoming('bytes', 'PUT', `${prefixed}/raw`, 'files:write', {
    summary: 'Upload a file as the plain body',
    query: {
      ...askedPath,
      mode: mode.optional(),
      overwrite: replacing,
      create_parents: queryBoolean.default(false),
    },
    headers: ifMatch,
    reply: uploaded,
  }),
  extract: incoming('bytes', 'POST', `${prefixed}/extract`, 'files:write', {
    summary: 'Unpack a tar or tar.gz into a directory',
    query: { ...askedPath, overwrite: replacing, create_parents: queryBoolean.default(false) },
    reply: z
      .object({ ...givenPath, files: z.number(), bytes: z.number(), sha256 })
      .meta({ id: 'ArchiveExtracted' }),
    status: 201,
    idempotency: 'replay',
  }),

  download: outgoing('bytes', `${prefixed}/download`, 'files:read', {
    summary: 'Download a file, or a directory as a tar',
    query: {
      ...askedPath,
      offset: readPart.offset,
      length: readPart.length,
      archive: z.enum(['tar', 'tar.gz']).optional().describe('For a directory'),
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
  search: outgoing('lines', `${prefixed}/search`, 'files:read', {
    summary: 'Search below a directory by name and by text; the last line says whether that is all',
    query: {
      path: path.optional(),
      path_encoding: pathEncoding,
      name: z.string().min(1).max(1000).optional().describe('A glob; with a slash over the whole path'),
      content: z.string().min(1).max(1000).optional().describe('Text that a line must hold'),
      ignore_case: queryBoolean.default(false),
      hidden: queryBoolean.default(false),
      limit: queryNumber(1, 10_000).default(1_000).describe('Matches at most'),
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
  watch: outgoing('events', `${prefixed}/watch`, 'files:read', {
    summary: 'Watch a path: ready, then change events; overflow means that changes were lost, list anew',
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

// REST routes of files on machines: list, read, write, transfer, search and watch.
import * as z from 'zod';
import { growing, incoming, outgoing, single } from './define-route.ts';
import {
  anywhere,
  condition,
  content,
  created,
  ifMatch,
  implied,
  listed,
  listing,
  newMode,
  prefixed,
  reading,
  readPart,
  removed,
  removing,
  size,
  writeConditions,
  writing,
} from './file-list-read-write-delete.ts';
import {
  absolutePath,
  entry,
  optionalPath,
  pathEncoding,
  readErrors,
  requestedPath,
  sha256,
  writeErrors,
} from './file-paths-and-entries.ts';
import {
  encoded,
  group,
  instant,
  machineId,
  mode,
  named,
  path,
  queryBoolean,
  queryNumber,
  someOf,
} from './shared-schemas.ts';

const uploaded = named('FileUploaded', { ...absolutePath, size, created, sha256 });
const fromTo = {
  source: path.describe('Path of the file or directory'),
  source_encoding: pathEncoding,
  destination: path.describe('New path'),
  destination_encoding: pathEncoding,
  overwrite: z
    .boolean()
    .default(false)
    .describe('Replace an existing file; false: the request fails with `already_exists` if the file exists'),
};
const match = z.object({
  entry: entry.describe('The file that matches'),
  line: z.number().optional().describe('Number of the line that contains the text, counted from 1'),
  text: z.string().optional().describe('The line that contains the text'),
});
const end = group('The last line', {
  matches: z.number().describe('Number of matches'),
  truncated: z.boolean().describe('True if there are more matches than `limit`'),
  visited: z.number().describe('Number of entries examined'),
  unreadable: z.number().describe('Number of entries that could not be read'),
});
const createParents = queryBoolean.default(false).describe('Create missing directories');
const replacing = queryBoolean
  .default(true)
  .describe('Replace an existing file; false: the request fails with `already_exists` if the file exists');

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
    body: encoded('content', z.strictObject(content)),
    example: { path: '/srv/app/motd', content: 'hello\n', mode: '0644' },
  }),
  writeAnywhere: single('PUT', '/files/content', 'files:write', {
    ...writing,
    ...implied,
    query: anywhere,
    body: encoded('content', z.strictObject({ ...anywhere, ...content })),
    example: { machine_id: 'mach_4fJ2kQ9ZtR7wXc0BvN1mLp', path: '/srv/app/motd', content: 'hello\n' },
  }),
  remove: single('DELETE', prefixed, 'files:write', { ...removing, query: removed }),
  removeAnywhere: single('DELETE', '/files', 'files:write', {
    ...removing,
    ...implied,
    query: { ...anywhere, ...removed },
  }),

  stat: single('GET', `${prefixed}/stat`, 'files:read', {
    summary: 'Get the properties of a file or directory',
    query: {
      ...requestedPath,
      checksum: z.literal('sha256').optional().describe('Add the SHA-256 of the content to the answer'),
    },
    reply: entry.extend({ sha256: sha256.optional() }).meta({ id: 'FileStat' }),
    errors: readErrors,
    waits: true,
  }),
  change: single('PATCH', prefixed, 'files:write', {
    summary: 'Change mode, owner or group',
    body: someOf(
      z.strictObject({
        ...requestedPath,
        mode: mode.optional(),
        owner: z.string().min(1).max(100).optional().describe('Name or user id of the new owner'),
        group: z.string().min(1).max(100).optional().describe('Name or group id of the new group'),
      }),
      ['mode', 'owner', 'group'],
    ),
    example: { path: '/srv/app/motd', mode: '0600' },
    errors: writeErrors,
    reply: entry,
  }),
  mkdir: single('POST', `${prefixed}/mkdir`, 'files:write', {
    summary: 'Create a directory',
    body: z.strictObject({
      ...requestedPath,
      mode: mode.optional().describe('Permission bits as 3 or 4 octal digits; default: 0755'),
      parents: z.boolean().default(false).describe('Create missing parent directories'),
    }),
    example: { path: '/srv/app/releases/1', parents: true },
    errors: writeErrors,
    reply: entry,
    status: 201,
    idempotency: 'replay',
  }),
  touch: single('POST', `${prefixed}/touch`, 'files:write', {
    summary: 'Create an empty file, or set the modification time of a file or directory',
    description: 'Follows symlinks. The file system may store the time less precisely.',
    body: z.strictObject({
      ...requestedPath,
      modified_at: instant.optional().describe('New modification time; default: now'),
      create: z
        .boolean()
        .default(true)
        .describe('True: a missing file is created; false: the request fails with `file_not_found`'),
    }),
    example: { path: '/srv/app/motd', modified_at: '2026-11-21T10:00:00.000Z' },
    errors: writeErrors,
    reply: entry,
    idempotency: 'replay',
  }),
  move: single('POST', `${prefixed}/move`, 'files:write', {
    summary: 'Move or rename a file or directory',
    description: 'Works across file systems too.',
    body: z.strictObject(fromTo),
    example: { source: '/srv/app/motd', destination: '/srv/app/motd.old', overwrite: true },
    errors: [...writeErrors, 'directory_not_empty'],
    reply: entry,
    idempotency: 'replay',
    waits: true,
  }),
  copy: single('POST', `${prefixed}/copy`, 'files:write', {
    summary: 'Copy a file or directory',
    description: 'A copy to another machine is streamed through the broker and checked by SHA-256.',
    body: z.strictObject({
      ...fromTo,
      destination_machine_id: machineId
        .optional()
        .describe('Id of the machine to copy to; default: the same machine'),
    }),
    example: { source: '/srv/app/motd', destination: '/srv/app/motd.copy', overwrite: true },
    errors: [...writeErrors, 'directory_not_empty'],
    reply: entry
      .extend({
        files_copied: z.number().describe('Number of files copied'),
        bytes_copied: z.number().describe('Number of bytes copied'),
      })
      .meta({ id: 'FileCopied' }),
    status: 201,
    idempotency: 'replay',
    waits: true,
  }),

  upload: incoming('form', 'POST', `${prefixed}/upload`, 'files:write', {
    summary: 'Upload a file as a form',
    description:
      'Send `path` in the query, or as a form field before the file. The broker then forwards the file while it arrives, and does not store it first.',
    query: {
      path: path.optional().describe('Path of the new file; may be sent in the form instead'),
      path_encoding: pathEncoding,
    },
    body: z.strictObject({
      path: path.optional().describe('Path of the new file; may be sent in the query instead'),
      path_encoding: pathEncoding,
      mode: mode.optional().describe(newMode),
      overwrite: replacing,
      create_parents: createParents,
    }),
    errors: writeErrors,
    reply: uploaded,
    status: 201,
    idempotency: 'replay',
  }),
  put: incoming('bytes', 'PUT', `${prefixed}/raw`, 'files:write', {
    summary: 'Upload a file as the plain body',
    query: {
      ...requestedPath,
      mode: mode.optional().describe(newMode),
      overwrite: replacing,
      create_parents: createParents,
    },
    headers: writeConditions,
    errors: [...writeErrors, 'precondition_failed'],
    replyHeaders: ['ETag'],
    reply: uploaded,
  }),
  extract: incoming('bytes', 'POST', `${prefixed}/extract`, 'files:write', {
    summary: 'Unpack a tar or tar.gz into a directory',
    description: 'The body is the archive. An entry that leads outside the directory is refused.',
    query: { ...requestedPath, overwrite: replacing, create_parents: createParents },
    errors: writeErrors,
    reply: named('ArchiveExtracted', {
      ...absolutePath,
      files: z.number().describe('Number of regular files unpacked'),
      bytes: z.number().describe('Number of bytes unpacked'),
      sha256,
    }),
    status: 201,
    idempotency: 'replay',
  }),

  download: outgoing('bytes', `${prefixed}/download`, 'files:read', {
    summary: 'Download a file, or a directory as a tar',
    description:
      'The media type follows from the extension of the file’s name. Range and conditional requests work as in RFC 9110.',
    types: ['application/octet-stream', 'application/x-tar', 'application/gzip', 'text/plain', '*/*'],
    replyHeaders: ['ETag'],
    errors: [...readErrors, 'range_not_satisfiable', 'precondition_failed'],
    query: {
      ...requestedPath,
      offset: readPart.offset,
      length: readPart.length,
      archive: z.enum(['tar', 'tar.gz']).optional().describe('Archive format, for a directory'),
    },
    headers: {
      range: condition('One range of bytes, such as `bytes=0-1023`'),
      if_range: condition(
        'ETag or modification time of the partial copy that the client has; if the file has changed, all of it is sent instead of `range`',
      ),
      ...ifMatch,
      if_none_match: condition(
        'ETag of the copy that the client has; the answer is 304 if the file still has this ETag',
      ),
      if_modified_since: condition(
        'Modification time of the copy that the client has; the answer is 304 if the file is unchanged since then',
      ),
      if_unmodified_since: condition(
        'Modification time that the file must still have; the answer is precondition_failed if the file has changed since then',
      ),
    },
  }),
  search: outgoing('lines', `${prefixed}/search`, 'files:read', {
    summary: 'Search below a directory by name and content',
    description:
      'Answers one JSON object per line. The last object is `end`, which says whether the result is complete.',
    errors: readErrors,
    query: {
      ...optionalPath,
      name: z
        .string()
        .min(1)
        .max(1000)
        .optional()
        .describe(
          'Glob pattern for the name or, if the pattern has a slash, for the path relative to the directory',
        ),
      content: z.string().min(1).max(1000).optional().describe('Text that a line must contain'),
      ignore_case: queryBoolean.default(false).describe('Ignore case'),
      hidden: queryBoolean.default(false).describe('Include entries whose name starts with a dot'),
      limit: queryNumber(1, 10_000).default(1_000).describe('Largest number of matches'),
    },
    reply: z.union([match, z.object({ end })]).meta({ id: 'SearchLine' }),
  }),
  watch: outgoing('events', `${prefixed}/watch`, 'files:read', {
    summary: 'Watch a file or directory for changes',
    description:
      'Events: `ready` once, then `change`. `overflow` means that changes were lost: list the directory again.',
    errors: readErrors,
    query: {
      ...optionalPath,
      recursive: queryBoolean.default(false).describe('Watch everything below the directory'),
    },
    reply: named('FileChange', {
      ...absolutePath,
      kind: z
        .enum(['added', 'changed', 'removed'])
        .optional()
        .describe('What happened; only in `change` events'),
      type: z.enum(['file', 'directory']).optional().describe('Type of the entry'),
    }),
  }),
};

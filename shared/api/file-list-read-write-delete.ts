// Parts of the routes that list, read, write and delete files. Each of these routes exists twice: below a machine, and
// below /files with the machine in the query or body.
import * as z from 'zod';
import {
  absolutePath,
  entry,
  optionalPath,
  readErrors,
  requestedPath,
  writeErrors,
} from './file-paths-and-entries.ts';
import { machineId, mode, named, queryBoolean, queryNumber } from './shared-schemas.ts';

const encoding = z.enum(['utf-8', 'base64']);

/**
 * Prefix of the routes that have the machine in their path. Four of these routes also exist below /files, with the
 * machine in the query or body.
 */
export const prefixed = '/machines/{machine_id}/files' as const;
export const anywhere = {
  machine_id: machineId
    .optional()
    .describe('Id of the machine; may be omitted if the broker has only one machine'),
};
export const implied = { impliesMachine: true } as const;

export const listing = {
  summary: 'List a directory',
  description:
    'Directories come before files, and each of the two groups is sorted by name. Without `limit` the answer has all entries, sent while they are read.',
  errors: readErrors,
  grows: 'files',
  reply: named('Listing', { ...absolutePath, files: z.array(entry).describe('Entries') }),
} as const;
export const listed = {
  ...optionalPath,
  hidden: queryBoolean.optional().describe('Include entries whose name starts with a dot; default: false'),
  limit: queryNumber(1, 10_000).optional().describe('Largest number of entries in the answer; default: all'),
  offset: queryNumber(0, 1e9).optional().describe('Number of entries to skip; default: 0'),
};

export const reading = {
  summary: 'Read a file',
  description:
    '`content` in the answer is text, or base64 if the file is not UTF-8. The limit is 10 MiB; download larger files instead.',
  errors: [...readErrors, 'file_too_large'],
  replyHeaders: ['ETag'],
  reply: named('FileContent', {
    ...absolutePath,
    content: z.string().describe('Content'),
    size: z.number().describe('Number of bytes of the whole file'),
    encoding: encoding.describe('Encoding of `content`'),
  }),
  waits: true,
} as const;
const anyNumber = queryNumber(Number.MIN_SAFE_INTEGER);
export const readPart = {
  ...requestedPath,
  encoding: encoding
    .optional()
    .describe(
      '`base64`: answer in base64 even if the content is UTF-8; default: base64 only if the content is not UTF-8',
    ),
  offset: anyNumber
    .optional()
    .describe('Offset of the first byte; a negative one counts from the end; default: 0'),
  length: queryNumber(0).optional().describe('Number of bytes to read; default: to the end'),
};

export const size = z.number().describe('Number of bytes');
export const created = z.boolean().describe('True if the write has created the file');
export const newMode = 'Permission bits as 3 or 4 octal digits; default: unchanged, or 0644 for a new file';
export const condition = (text: string) => z.string().max(1000).optional().describe(text);
export const ifMatch = { if_match: condition('ETag that the file must have; else precondition_failed') };
export const writeConditions = {
  ...ifMatch,
  if_none_match: z
    .literal('*', 'must be *')
    .optional()
    .describe('`*`: the file must not exist; else precondition_failed'),
};
export const writing = {
  summary: 'Write a file',
  description:
    'Replaces the content atomically. The owner stays, and so does the mode unless `mode` is set. Follows symlinks.',
  errors: [...writeErrors, 'file_too_large', 'precondition_failed'],
  replyHeaders: ['ETag'],
  headers: writeConditions,
  reply: named('FileWritten', { ...absolutePath, size, created }),
  bodyLimit: 16 * 1024 * 1024,
  waits: true,
} as const;
export const content = {
  ...requestedPath,
  content: z.string().describe('Content'),
  encoding: encoding.default('utf-8').describe('Encoding of `content`'),
  mode: mode.optional().describe(newMode),
  create_parents: z.boolean().default(false).describe('Create missing directories'),
};

export const removing = {
  summary: 'Delete a file or directory',
  description:
    'Deletes a symlink itself, never its target. Refuses `/`, the home directory of the agent’s user, the directories of `--root`, the agent’s own files, and every directory that contains one of these.',
  errors: [...writeErrors, 'directory_not_empty'],
  reply: named('FileDeleted', { ...absolutePath, deleted: z.literal(true).describe('Always true') }),
  waits: true,
} as const;
export const removed = {
  ...requestedPath,
  recursive: queryBoolean.default(false).describe('Delete a directory and everything in it'),
};

// Schemas of paths and file entries, and error codes, that several file routes share.
import * as z from 'zod';
import { machineErrors } from './route.ts';
import { named, path, timestamp } from './shared-schemas.ts';

export const readErrors = [
  ...machineErrors,
  'file_not_found',
  'not_a_directory',
  'is_a_directory',
  'unsupported_file',
  'invalid_path',
  'io_error',
] as const;
export const writeErrors = [...readErrors, 'already_exists', 'file_busy', 'no_space'] as const;

export const sha256 = z.string().describe('SHA-256 of the bytes, hexadecimal');
export const pathEncoding = z
  .literal('base64')
  .optional()
  .describe('`base64` if the path is in base64; needed for a path that is not UTF-8');
/**
 * The fields for a path in an answer. Requests use `requestedPath`, or `optionalPath` for a path that they may omit.
 */
export const absolutePath = { path: z.string().describe('Absolute path'), path_encoding: pathEncoding };
export const requestedPath = { path, path_encoding: pathEncoding };
export const optionalPath = {
  path: path.optional().describe('Directory; default: the home directory of the agent’s user'),
  path_encoding: pathEncoding,
};

const special = z.enum(['fifo', 'socket', 'block', 'char']);

export const entry = named('FileEntry', {
  name: z.string().describe('Base name'),
  path: z.string().describe('Absolute path'),
  type: z.enum(['file', 'directory']).describe('Type of the file; for a symlink the type of its target'),
  size: z.number().optional().describe('Number of bytes; absent for directories'),
  mode: z.string().meta({ description: 'Permission bits, octal', examples: ['0644'] }),
  setuid: z.boolean().optional().describe('The setuid bit'),
  setgid: z.boolean().optional().describe('The setgid bit'),
  sticky: z.boolean().optional().describe('The sticky bit'),
  owner: z.string().describe('Name of the owner, or the user id if this id has no name'),
  group: z.string().describe('Name of the group, or the group id if this id has no name'),
  modified_at: timestamp.describe('Time of the last change of the content'),
  link_target: z.string().optional().describe('Target of a symlink; absent for other files'),
  special: special
    .optional()
    .describe(
      'Kind of special file: FIFO, socket or device; absent for regular files and directories. The `type` of a special file is `file`',
    ),
  name_encoding: z
    .literal('base64')
    .optional()
    .describe('`base64` if `name`, `path` and `link_target` are in base64, because one of them is not UTF-8'),
});

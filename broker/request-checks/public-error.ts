// Converts any failure to a public error: the caller gets a documented error code, and internal details are only
// logged.
import { z } from 'zod';
import { AppError, errnoOf } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';

/** Returns the error for the caller. Logs an internal failure with `about`, which identifies the request. */
export function publicError(
  error: unknown,
  about: { request_id: string; path: string },
  log: Logger,
): AppError {
  const trouble = storageTrouble(error instanceof AppError ? error.cause : error);
  if (trouble || !(error instanceof AppError) || error.code === 'internal_error') {
    log.error({ err: error, ...about }, 'a request failed unexpectedly');
  }
  if (trouble) return new AppError('unavailable', `nothing was changed: ${trouble}`);
  if (error instanceof AppError) return error;
  return new AppError('internal_error', `unexpected failure; see the broker's log for ${about.request_id}`);
}

const full = 'the broker’s disk is full or read-only; free space on it or make it writable, and try again';
const failed = 'the broker’s disk reported an error; check the disk, and see the broker’s log';
const tooManyFiles = 'the broker has too many files open; try again, or raise LimitNOFILE of its unit';
const locked = 'another program has locked the broker’s history.db; try again when it has ended';

/** Messages for failures of the broker's own files, by errno or SQLite result code (sqlite.org/rescode.html). */
const storageTroubles: Readonly<Record<string, string>> = {
  ...{ ENOSPC: full, EDQUOT: full, EROFS: full, EIO: failed, EUCLEAN: failed },
  ...{ EMFILE: tooManyFiles, ENFILE: tooManyFiles },
  // Result codes of SQLite: READONLY, FULL, IOERR, CANTOPEN, BUSY.
  ...{ 8: full, 13: full, 10: failed, 14: tooManyFiles, 5: locked },
};

/**
 * Returns the message for a failure of the broker's own files. Returns undefined for any other error, for example a
 * failure of a machine's disk.
 */
function storageTrouble(error: unknown): string | undefined {
  const errno = errnoOf(error) ?? '';
  const sqlite = z.looseObject({ errcode: z.int() }).safeParse(error);
  // The low byte of SQLite's extended result code is the primary result code.
  const code = errno === 'ERR_SQLITE_ERROR' && sqlite.success ? sqlite.data.errcode & 0xff : errno;
  return storageTroubles[code];
}

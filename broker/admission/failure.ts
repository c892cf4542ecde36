// What a failure is called outside: a code of the table, whatever went wrong inside; internals are logged, never sent.
import { AppError, errnoOf } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';

const saneRequestId = /^[A-Za-z0-9._-]{1,64}$/;

/** The id that a request came with, if it is a sane one, else a new one. */
export function requestIdFrom(given: string): string {
  return saneRequestId.test(given) ? given : newId('request');
}

/** The failure as its caller is told of it. `about`: which request, for the log. */
export function toldFailure(
  error: unknown,
  about: { request_id: string; path: string },
  log: Logger,
): AppError {
  if (!(error instanceof AppError) || error.code === 'internal_error') {
    log.error({ err: error, ...about }, 'a request failed');
  }
  if (error instanceof AppError) return error;
  return (
    diskTrouble(error) ??
    new AppError(
      'internal_error',
      `unexpected failure; the broker's log tells more under ${about.request_id}`,
    )
  );
}

/** The broker's own disk, where a caller can do nothing but try again; the change was undone. */
function diskTrouble(error: unknown): AppError | undefined {
  const full =
    ['ENOSPC', 'EDQUOT', 'EROFS'].includes(errnoOf(error) ?? '') || /disk is full/.test(String(error));
  if (!full) return undefined;
  return new AppError(
    'unavailable',
    'the broker’s disk takes no more: nothing was changed; free space on it',
  );
}

// The messages for system errors of a machine's disk, and of the broker's own files.
import { getSystemErrorName } from 'node:util';
import { describe, expect, test } from 'vitest';
import { publicError } from '../broker/request-checks/public-error.ts';
import { AppError, fromErrno } from '../shared/errors.ts';
import { quiet } from './start-farhand.ts';

/** An error as Node throws it, without a code for an unknown errno. */
const systemError = (errno: number): Error =>
  Object.assign(new Error('it failed'), { code: getSystemErrorName(-errno), errno: -errno });

const about = { request_id: 'req_1', path: '/x' };

describe('a system error', () => {
  test.each([
    ['EDQUOT', 122, 'no_space', 507],
    ['ESTALE', 116, 'conflict', 409],
    ['EUCLEAN', 117, 'io_error', 500],
    ['EIO', 5, 'io_error', 500],
  ])('%s (%i) of a machine’s disk is %s %i', (name, errno, code, status) => {
    const error = fromErrno(systemError(errno), '/data');
    expect([error.code, error.status, error.details]).toEqual([code, status, { path: '/data', errno: name }]);
    // The error as it arrives from the machine.
    const received = new AppError(error.code, error.message, error.details);
    expect(publicError(received, about, quiet)).toBe(received);
  });

  test.each([
    ['ENOSPC', 28],
    ['EDQUOT', 122],
    ['EIO', 5],
    ['EMFILE', 24],
    ['ENFILE', 23],
  ])('%s of the broker’s own files is unavailable', (_name, errno) => {
    const error = systemError(errno);
    for (const own of [error, fromErrno(error, '/var/lib/farhand-broker/output')]) {
      const answered = publicError(own, about, quiet);
      expect([answered.code, answered.status, answered.details]).toEqual(['unavailable', 503, {}]);
    }
  });

  test('of any other kind is internal_error', () => {
    expect(publicError(systemError(22), about, quiet).code).toBe('internal_error');
    expect(publicError(new Error('x'), about, quiet).code).toBe('internal_error');
  });
});

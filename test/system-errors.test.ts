// Messages for system errors on a machine's disk, and for the broker's own files.
import { getSystemErrorName } from 'node:util';
import { describe, expect, test } from 'vitest';
import { publicError } from '../broker/request-checks/public-error.ts';
import { AppError, fromErrno } from '../shared/errors.ts';
import { quiet } from './start-farhand.ts';

/** An error as Node throws it. An unknown errno has no code. */
const systemError = (errno: number): Error =>
  Object.assign(new Error('it failed'), { code: getSystemErrorName(-errno), errno: -errno });

const about = { request_id: 'req_1', path: '/x' };

describe('a system error', () => {
  test.each([
    ['EDQUOT', 122, 'no_space', 507],
    ['ESTALE', 116, 'conflict', 409],
    ['EUCLEAN', 117, 'io_error', 500],
    ['EIO', 5, 'io_error', 500],
    ['ENOTCONN', 107, 'io_error', 500],
  ])('%s (%i) of a machine’s disk is %s %i', (name, errno, code, status) => {
    const error = fromErrno(systemError(errno), '/data');
    expect([error.code, error.status, error.details]).toEqual([code, status, { path: '/data', errno: name }]);
    // What the broker decodes from the machine's error.
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

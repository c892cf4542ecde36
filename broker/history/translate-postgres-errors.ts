// Converts a failure of PostgreSQL to the error that ends the start of the broker, or to the error that a client gets.
import { AppError, StartError } from '../../shared/errors.ts';
import { databaseUnavailable, ownedElsewhere } from './group-commit.ts';

/** PostgreSQL's error codes (appendix A of its manual) that mean wrong settings. */
const wrong: Readonly<Record<string, string>> = {
  '28P01': 'refuses the password: see --database-password-file',
  '28000': 'refuses the user: see pg_hba.conf of the server',
  '3D000': 'does not exist: create the database with createdb',
  '42501': 'does not allow this user to create tables: make the user the owner of the database',
};

/** Code of the error that the database's function fence() raises if another broker owns the machine. */
const otherOwnerCode = 'FH001';

function codeOf(error: unknown): string {
  const code: unknown = error instanceof Error && 'code' in error ? error.code : undefined;
  return typeof code === 'string' ? code : '';
}

/**
 * Returns the message of an error, or its code if the message is empty. Node's error has an empty message if all
 * addresses of a name refuse the connection.
 */
const textOf = (error: unknown): string => (error instanceof Error && error.message) || codeOf(error);

/**
 * Returns the error that ends a start. Its exit code is 78 if only a change of the settings helps, otherwise
 * 1.
 */
export function startErrorOf(error: unknown, name: string): StartError {
  if (error instanceof StartError) return error;
  const meaning = wrong[codeOf(error)];
  const text = textOf(error);
  if (meaning) return new StartError(`${name} ${meaning} (${text})`, 78, { cause: error });
  if (/client password must be/.test(text))
    return new StartError(`${name} asks for a password: see --database-password-file`, 78, { cause: error });
  // Node's advice at the end of the text is cut off, because it names an option of Node and not of farhand-broker.
  if (/does not support SSL|certificate|ERR_TLS|self.signed/i.test(`${text} ${codeOf(error)}`))
    return new StartError(
      `${name} offers no TLS that this broker trusts (${text.replace(/; if the root CA.*/, '')}): see sslmode and sslrootcert`,
      78,
      {
        cause: error,
      },
    );
  return new StartError(`${name} cannot be used (${text}): start it, or correct --database-url`, 1, {
    cause: error,
  });
}

/** True if the connection or the server failed, not the statement. */
function isConnectionFailure(error: unknown): boolean {
  const code = codeOf(error);
  // These codes mean that a connection failed, that the server stops or starts, or that there are too many
  // connections.
  if (/^(08...|57P0.|53300)$/.test(code)) return true;
  if (/^E[A-Z]+$/.test(code)) return true;
  return error instanceof Error && !code && /onnection|timeout/.test(error.message);
}

/** Converts failures of PostgreSQL to the errors that clients get. Returns any other error unchanged. */
export function requestErrorOf(error: unknown): unknown {
  if (isConnectionFailure(error)) return databaseUnavailable();
  if (codeOf(error) === otherOwnerCode) return ownedElsewhere();
  if (/^(22021|22P05)$/.test(codeOf(error)))
    return new AppError('validation_failed', 'a text has a NUL character, which PostgreSQL cannot store');
  if (codeOf(error) === '40P01')
    return new AppError('unavailable', 'two changes of the broker’s database blocked each other; try again');
  if (codeOf(error) === '53100')
    return new AppError(
      'unavailable',
      'the disk of the broker’s database is full; free space on it and try again',
    );
  return error;
}

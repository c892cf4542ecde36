// The error type AppError, and the table of error codes with their HTTP status and errnos.

/** Every error code of the API, with its HTTP status. */
export const codes = {
  invalid_request: 400,
  not_a_directory: 400,
  is_a_directory: 400,
  unsupported_file: 400,
  invalid_path: 400,
  unauthorized: 401,
  forbidden: 403,
  confirmation_required: 403,
  permission_denied: 403,
  machine_not_found: 404,
  session_not_found: 404,
  client_not_found: 404,
  command_not_found: 404,
  batch_not_found: 404,
  schedule_not_found: 404,
  webhook_not_found: 404,
  delivery_not_found: 404,
  key_not_found: 404,
  login_not_found: 404,
  join_token_not_found: 404,
  run_not_found: 404,
  alert_not_found: 404,
  rule_not_found: 404,
  channel_not_found: 404,
  window_not_found: 404,
  upgrade_not_found: 404,
  saved_command_not_found: 404,
  package_not_found: 404,
  route_not_found: 404,
  file_not_found: 404,
  method_not_allowed: 405,
  already_exists: 409,
  directory_not_empty: 409,
  conflict: 409,
  file_busy: 409,
  precondition_failed: 412,
  file_too_large: 413,
  payload_too_large: 413,
  range_not_satisfiable: 416,
  validation_failed: 422,
  idempotency_mismatch: 422,
  rate_limited: 429,
  internal_error: 500,
  io_error: 500,
  not_supported: 501,
  machine_offline: 503,
  machine_timeout: 503,
  machine_error: 503,
  unavailable: 503,
  no_space: 507,
} as const;

export type Code = keyof typeof codes;

/** The errnos of each code. EINVAL means an invalid name, or a move of a directory into itself. */
const errnos: Readonly<Partial<Record<Code, readonly string[]>>> = {
  file_not_found: ['ENOENT'],
  permission_denied: ['EACCES', 'EPERM', 'EROFS'],
  already_exists: ['EEXIST'],
  directory_not_empty: ['ENOTEMPTY'],
  not_a_directory: ['ENOTDIR'],
  is_a_directory: ['EISDIR'],
  invalid_path: ['ENAMETOOLONG', 'ELOOP', 'EILSEQ', 'EINVAL', 'ERR_INVALID_ARG_VALUE'],
  unsupported_file: ['ENXIO', 'ENODEV'],
  no_space: ['ENOSPC', 'EDQUOT', 'EMLINK'],
  file_too_large: ['EFBIG'],
  file_busy: ['EBUSY', 'ETXTBSY'],
  conflict: ['ESTALE'],
  not_supported: ['EXDEV', 'EOPNOTSUPP', 'ENOTSUP'],
  // EUCLEAN means that the file system found damage in its own data, ENOTCONN that its program (FUSE) has ended.
  io_error: ['EIO', 'EUCLEAN', 'ENOTCONN'],
  unavailable: ['EMFILE', 'ENFILE'],
};
const codeOfErrno = new Map(
  // The cast is safe: the keys of the table are codes.
  Object.entries(errnos).flatMap(([code, names]) => names.map((name) => [name, code as Code] as const)),
);

/** An error with a code of the table. The message names the next step, and never contains a secret. */
export class AppError extends Error {
  override readonly name = 'AppError';
  readonly code: Code;
  readonly details: Readonly<Record<string, unknown>>;

  constructor(
    code: Code,
    message: string,
    details: Readonly<Record<string, unknown>> = {},
    options?: ErrorOptions,
  ) {
    super(message, options);
    this.code = code;
    this.details = details;
  }

  get status(): number {
    return codes[this.code];
  }
}

/** Makes an error about one field of a request, such as `body: env: at most 256 variables`. */
export function fieldError(
  part: string,
  path: string,
  message: string,
  code: 'validation_failed' | 'invalid_request' = 'validation_failed',
): AppError {
  return new AppError(code, `${part}: ${path && `${path}: `}${message}`, { issues: [{ path, message }] });
}

/** True if a text is a known error code. A newer agent or broker may send unknown codes. */
export function isCode(text: string): text is Code {
  return Object.hasOwn(codes, text);
}

/** Names of Linux errnos that Node has no name for. The key is the text that Node puts into `error.code` instead. */
const unnamed: Readonly<Record<string, string>> = {
  'Unknown system error -116': 'ESTALE',
  'Unknown system error -117': 'EUCLEAN',
  'Unknown system error -122': 'EDQUOT',
};

/** The errno name of a system error, such as "ENOENT"; undefined for other errors. */
export function errnoOf(error: unknown): string | undefined {
  if (!(error instanceof Error) || !('code' in error) || typeof error.code !== 'string') return undefined;
  return unnamed[error.code] ?? error.code;
}

/** True if the error is a system error with one of these names, such as "ENOENT". */
export const isErrno = (error: unknown, ...names: string[]): boolean => names.includes(errnoOf(error) ?? '');

/** Makes a handler for `catch` that ignores system errors with these names and throws all other errors. */
export const ignoring =
  (...names: string[]) =>
  (error: unknown): undefined => {
    if (!isErrno(error, ...names)) throw error;
  };

/**
 * Converts a system error about `path` to an AppError. Returns an AppError unchanged. Any other error becomes
 * internal_error.
 */
export function fromErrno(error: unknown, path: string): AppError {
  if (error instanceof AppError) return error;
  const errno = errnoOf(error) ?? '';
  const code = codeOfErrno.get(errno) ?? 'internal_error';
  return new AppError(code, `${path}: ${explain(code)}`, { path, ...(errno && { errno }) }, { cause: error });
}

function explain(code: Code): string {
  return code === 'internal_error'
    ? 'an unexpected error occurred; see the log of the agent or broker'
    : code.replaceAll('_', ' ');
}

/** Thrown if a program cannot start. The exit code is 78 for bad configuration, 1 for any other reason. */
export class StartError extends Error {
  override readonly name = 'StartError';
  readonly exitCode: 1 | 78;

  constructor(message: string, exitCode: 1 | 78 = 78, options?: ErrorOptions) {
    super(message, options);
    this.exitCode = exitCode;
  }
}

/** Thrown for wrong usage of a command line; the exit code is 2. */
export class UsageError extends Error {
  override readonly name = 'UsageError';
}

// Writes activity.log, the machine's own record of every call of the broker except GetMetrics. The file API cannot read
// that file.
import type { Call__Output } from '../../proto/types/farhand/link/v1/Call.ts';
import { type Method, methods } from '../../shared/agent-rpcs.ts';
import { after, iso, monotonic } from '../../shared/clock.ts';
import { LogLimiter } from '../../shared/log-limiter.ts';
import type { Logger } from '../../shared/logger.ts';
import { cut, Lines } from './json-lines-writer.ts';

type Call = Pick<Call__Output, 'method' | 'request_id' | 'caller'>;

const longestName = 200;
/** Milliseconds after which a call that still runs gets a log line about its start. */
const slowMs = 1_000;
/**
 * Maximum number of logged lines per minute for refused calls with the same method and error code. Further calls
 * are only counted.
 */
const mostRefusals = 5;

/** The only method that is not logged: brokers call it often, and it returns only metrics. */
const unlogged: Method = 'GetMetrics';
/** Calls of unlimited duration. A line is written when such a call starts, and another when it ends. */
const lasting: ReadonlySet<string> = new Set<Method>([
  'WatchFiles',
  'StartProcess',
  'FollowProcess',
  'OpenTerminal',
  'KeepTerminal',
  'AttachTerminal',
]);

export class AuditLog {
  readonly #lines: Lines;
  readonly #refusals: LogLimiter<{ method: string; result: string }>;

  private constructor(lines: Lines) {
    this.#lines = lines;
    this.#refusals = new LogLimiter(mostRefusals, (one, more) => this.add({ event: 'more', ...one, more }));
  }

  static async open(directory: string, log: Logger): Promise<AuditLog> {
    return new AuditLog(await Lines.open(directory, 'activity', log));
  }

  /** Begins the log entry of a call. `refused`: true if the agent does not run the call. */
  begin(call: Call, refused = false): AuditedCall {
    return new AuditedCall(call, refused, this);
  }

  /** Resolves when all lines are in the file, or the write has failed. */
  async close(): Promise<void> {
    this.#refusals.close();
    await this.#lines.close();
  }

  add(line: Fields): void {
    this.#lines.add({ at: iso(), ...line });
  }

  /**
   * Counts a refused call. Returns true if the call gets a log line of its own. In each minute, only the first
   * `mostRefusals` calls with the same method and error code get one. A later line reports the number of the others.
   */
  admit(name: string, result: string): boolean {
    const method = methods.has(name) ? name : 'unknown';
    return this.#refusals.take(`${method} ${result}`, { method, result });
  }
}

/** Collects the request, the responses and the result of one call, and writes them as log lines. */
export class AuditedCall {
  readonly #refused: boolean;
  readonly #log: AuditLog;
  readonly #method: string;
  readonly #common: Fields;
  readonly #begun = monotonic();
  #request: Fields = {};
  #exit: Fields | undefined;
  #done = false;
  #stopWaiting = (): void => {};

  constructor({ method, request_id, caller }: Call, refused: boolean, log: AuditLog) {
    this.#method = method;
    this.#refused = refused;
    this.#log = log;
    const bounded = (text = ''): string => cut(text, longestName);
    this.#common = {
      method: bounded(method),
      key_id: bounded(caller?.key_id),
      key_name: bounded(caller?.key_name),
      request_id: bounded(request_id),
    };
  }

  /** Adds the request to the log entry. If a call sends several requests, only the first is added. */
  asked(request: unknown): void {
    this.#request = fieldsOf(request);
    if (this.#refused || this.#method === unlogged) return;
    if (lasting.has(this.#method)) this.#add('start', {});
    else this.#stopWaiting = after(slowMs, () => this.#add('start', {}));
  }

  answered(response: unknown): void {
    if (lasting.has(this.#method)) this.#exit = exitOf(response) ?? this.#exit;
  }

  /** Called when the operation has succeeded, even if its response then fails to reach the broker. */
  done(): void {
    this.#done = true;
  }

  /** Called when the call ends. `result`: "ok" or an error code. */
  ended(result: string): void {
    this.#stopWaiting();
    if (this.#method === unlogged) return;
    const refusal = this.#refused || result === 'permission_denied';
    if (refusal && !this.#log.admit(this.#method, result)) return;
    const unheard = this.#done && result !== 'ok';
    const outcome = unheard ? { result: 'ok', unheard } : { result };
    this.#add('end', { ...this.#exit, ...outcome, ms: Math.round(monotonic() - this.#begun) });
  }

  #add(event: 'start' | 'end', more: Fields): void {
    // The fields of the request come last: they can be long, and a line that is too long loses its end.
    this.#log.add({ event, ...this.#common, ...more, ...this.#request });
  }
}

// ---- The request fields that are logged. File contents, input and environment variables are never logged

type Fields = Record<string, unknown>;

/** Names of the logged request fields, the same for every method. All other request fields are left out. */
const loggable: ReadonlySet<string> = new Set([
  ...['id', 'client_id', 'path', 'source', 'destination', 'command', 'user', 'cwd', 'mode', 'owner', 'group'],
  ...['signal', 'name', 'recursive', 'ids', 'args', 'upgrade_id', 'version'],
]);
const mostItems = 64;

function loggedAs(value: unknown, field: string): unknown {
  if (Buffer.isBuffer(value)) return value.toString();
  // The mode of a file is written in octal digits.
  if (field === 'mode' && typeof value === 'number') return value.toString(8).padStart(4, '0');
  if (!Array.isArray(value)) return value || undefined;
  if (value.length === 0) return undefined;
  const items = value.slice(0, mostItems).map((item) => loggedAs(item, field));
  return [...items, ...(value.length > mostItems ? ['…'] : [])];
}

/** The logged fields of a decoded request. JSON leaves out fields that are undefined. */
function fieldsOf(request: unknown): Fields {
  // Uploads and terminal clients send their fields in `open`. Requests that start a process or terminal send them in
  // `spec`.
  const { open, spec, ...own } = request as Fields & { open?: object | null; spec?: object | null };
  const { program, content, ...all }: Fields = { ...own, ...open, ...spec };
  const named = { ...all, command: all.command ?? program };
  const logged = Object.entries(named).filter(([field]) => loggable.has(field));
  return {
    ...Object.fromEntries(logged.map(([field, value]) => [field, loggedAs(value, field)])),
    in_contents: content ? true : undefined,
  };
}

interface Response {
  /** Only responses about processes and terminals contain an event. */
  event?: { exit?: { outcome?: string; exit_code?: number; signal?: string } | null } | null;
}

/** Returns how a process ended; undefined if the response is not an exit event. */
function exitOf(response: unknown): Fields | undefined {
  const { event } = response as Response;
  if (!event?.exit) return undefined;
  const { outcome, exit_code, signal } = event.exit;
  const ended = outcome?.replace('PROCESS_OUTCOME_', '').toLowerCase();
  return { outcome: ended, exit_code, signal: signal || undefined };
}

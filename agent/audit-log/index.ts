// Writes the audit log of the machine: all calls of the broker except GetMetrics. File requests cannot read
// it.
import type { Call__Output } from '../../proto/types/farhand/link/v1/Call.ts';
import { type Method, methods } from '../../shared/agent-rpcs.ts';
import { after, iso, monotonic } from '../../shared/clock.ts';
import { LogLimiter } from '../../shared/log-limiter.ts';
import type { Logger } from '../../shared/logger.ts';
import { cut, Lines } from './json-lines-file.ts';

type Call = Pick<Call__Output, 'method' | 'request_id' | 'caller'>;

const longestName = 200;
/** Milliseconds after which a call that is not over gets a line for its start. */
const slowMs = 1_000;
/**
 * Most lines a minute for refusals of each method and code. Further refusals are only counted, so that they
 * do not push older lines out of the log.
 */
const mostRefusals = 5;
const minute = 60_000;

/** The only method that is not logged, because a broker may call it often and gets only metrics. */
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

/** The log `activity.log` in a directory, with older files beside it. */
export class AuditLog {
  readonly #lines: Lines;
  readonly #refusals: LogLimiter<{ method: string; result: string }>;

  private constructor(lines: Lines) {
    this.#lines = lines;
    this.#refusals = new LogLimiter(mostRefusals, minute, (one, more) =>
      this.add({ event: 'more', ...one, more }),
    );
  }

  static async open(directory: string, log: Logger): Promise<AuditLog> {
    return new AuditLog(await Lines.open(directory, 'activity', log));
  }

  /** Begins the entry of a call. `refused`: the agent does not run the call. */
  begin(call: Call, refused = false): AuditedCall {
    return new AuditedCall(call, refused, this);
  }

  /** Resolves when all lines are in the file. */
  async close(): Promise<void> {
    this.#refusals.close();
    await this.#lines.close();
  }

  add(line: Fields): void {
    this.#lines.add({ at: iso(), ...line });
  }

  /** Counts a refusal. True if it gets a line of its own. */
  admit(name: string, result: string): boolean {
    const method = methods.has(name) ? name : 'unknown';
    return this.#refusals.take(`${method} ${result}`, { method, result });
  }
}

/** One call: the link reports its request, its responses and its end. */
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
    // The broker sets these texts, so they are cut to a length, and not checked.
    const bounded = (text = ''): string => cut(text, longestName);
    this.#common = {
      method: bounded(method),
      key_id: bounded(caller?.key_id),
      key_name: bounded(caller?.key_name),
      request_id: bounded(request_id),
    };
  }

  /** Reports the request of the call, or its first request if there are several. */
  asked(request: unknown): void {
    this.#request = fieldsOf(request);
    if (this.#refused || this.#method === unlogged) return;
    if (lasting.has(this.#method)) this.#add('start', {});
    else this.#stopWaiting = after(slowMs, () => this.#add('start', {}));
  }

  answered(response: unknown): void {
    if (lasting.has(this.#method)) this.#exit = exitOf(response) ?? this.#exit;
  }

  /** Reports that the operation is done, even if the response does not arrive at the broker. */
  done(): void {
    this.#done = true;
  }

  /** `result`: "ok", or the code of the failure. */
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
    // The fields of the request come last, because a line that is too long is cut at its end.
    this.#log.add({ event, ...this.#common, ...more, ...this.#request });
  }
}

// ---- The fields of a request that are logged: never contents, input or environment

/** Fields of a log line, named as people query them with jq. */
type Fields = Record<string, unknown>;

/** The request fields that are logged, of all methods. A field that is not listed here is not logged. */
const loggable: ReadonlySet<string> = new Set([
  ...['id', 'client_id', 'path', 'source', 'destination', 'command', 'user', 'cwd', 'mode', 'owner', 'group'],
  ...['signal', 'name', 'recursive', 'ids', 'args'],
]);
const mostItems = 64;

function loggedAs(value: unknown): unknown {
  if (Buffer.isBuffer(value)) return value.toString();
  // Only the mode of a file is a number; it is logged in octal digits.
  if (typeof value === 'number') return value.toString(8).padStart(4, '0');
  if (!Array.isArray(value)) return value || undefined;
  if (value.length === 0) return undefined;
  return [...value.slice(0, mostItems).map(loggedAs), ...(value.length > mostItems ? ['…'] : [])];
}

/** The logged fields of a decoded request. JSON leaves out fields that are undefined. */
function fieldsOf(request: unknown): Fields {
  // Requests of uploads and attachments have their fields in `open`, those of processes and terminals in
  // `spec`.
  const { open, spec, ...own } = request as Fields & { open?: object | null; spec?: object | null };
  const { program, content, ...all }: Fields = { ...own, ...open, ...spec };
  const named = { ...all, command: all.command ?? program };
  const logged = Object.entries(named).filter(([field]) => loggable.has(field));
  return {
    ...Object.fromEntries(logged.map(([field, value]) => [field, loggedAs(value)])),
    in_contents: content ? true : undefined,
  };
}

interface Response {
  /** Only processes and terminals answer with events. */
  event?: { exit?: { outcome?: string; exit_code?: number; signal?: string } | null } | null;
}

/** How a process ended, if a response reports it. */
function exitOf(response: unknown): Fields | undefined {
  const { event } = response as Response;
  if (!event?.exit) return undefined;
  const { outcome, exit_code, signal } = event.exit;
  const ended = outcome?.replace('PROCESS_OUTCOME_', '').toLowerCase();
  return { outcome: ended, exit_code, signal: signal || undefined };
}

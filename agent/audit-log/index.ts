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
 * Lines a minute for refusals of each method and code, then a number: they must not displace what was done.
 */
const mostRefusals = 5;
const minute = 60_000;

/** The only method that is not logged: the broker calls it all the time, and gets nothing but numbers. */
const unlogged: Method = 'GetMetrics';
/** Calls that are there to last have a line as they start, too, and not only when they take long. */
const lasting: ReadonlySet<string> = new Set<Method>([
  'WatchFiles',
  'StartProcess',
  'FollowProcess',
  'OpenTerminal',
  'KeepTerminal',
  'AttachTerminal',
]);

/** `activity.log` in a directory, with older ones beside it. */
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

  /** Whether one more refusal gets a line of its own. */
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
    // Set by the broker: logged as received, in bounds.
    const bounded = (text = ''): string => cut(text, longestName);
    this.#common = {
      method: bounded(method),
      key_id: bounded(caller?.key_id),
      key_name: bounded(caller?.key_name),
      request_id: bounded(request_id),
    };
  }

  /** Its request, or the first of many. */
  asked(request: unknown): void {
    this.#request = fieldsOf(request);
    if (this.#refused || this.#method === unlogged) return;
    if (lasting.has(this.#method)) this.#add('start', {});
    else this.#stopWaiting = after(slowMs, () => this.#add('start', {}));
  }

  answered(response: unknown): void {
    if (lasting.has(this.#method)) this.#exit = exitOf(response) ?? this.#exit;
  }

  /** The act is done, even if its answer reaches no caller. */
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
    // Long fields come last: they are cut first.
    this.#log.add({ event, ...this.#common, ...more, ...this.#request });
  }
}

// ---- Fields logged of a call: its subject, never contents, input or environment

/** Fields of a log line, named as people query them with jq. */
type Fields = Record<string, unknown>;

/**
 * The request fields that are logged, of any method. A new field of a request is private until it is named
 * here.
 */
const loggable: ReadonlySet<string> = new Set([
  ...['id', 'client_id', 'path', 'source', 'destination', 'command', 'user', 'cwd', 'mode', 'owner', 'group'],
  ...['signal', 'name', 'recursive', 'ids', 'args'],
]);
const mostItems = 64;

function loggedAs(value: unknown): unknown {
  if (Buffer.isBuffer(value)) return value.toString();
  // The mode of a file.
  if (typeof value === 'number') return value.toString(8).padStart(4, '0');
  if (!Array.isArray(value)) return value || undefined;
  if (value.length === 0) return undefined;
  return [...value.slice(0, mostItems).map(loggedAs), ...(value.length > mostItems ? ['…'] : [])];
}

/**
 * The logged fields of a decoded request, or of the first where there are many; undefined values are left out
 * of a line.
 */
function fieldsOf(request: unknown): Fields {
  // Every request is a message; that of an upload or attachment has `open`, that of a process or terminal
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

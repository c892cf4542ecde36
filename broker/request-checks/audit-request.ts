// Writes the audit record of a request. If the request makes a change, the record is part of the same transaction.
import type { Deed } from '../../shared/api/audit.ts';
import type { Caller, Journal } from '../../shared/api/route-table.ts';
import type { MachineId } from '../../shared/api/shared-schemas.ts';
import { now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newTimedId } from '../../shared/ids-and-secrets.ts';
import { LogLimiter } from '../../shared/log-limiter.ts';
import type { Logger } from '../../shared/logger.ts';
import type { History } from '../history/history-database.ts';
import { replayed } from './idempotency.ts';
import type { RawInput, Subject } from './parse-api-request.ts';

/**
 * The machines and details of a request for the audit log. If the request could not be parsed, some of them may be
 * missing.
 */
export interface AuditedRequest {
  machines: readonly MachineId[];
  what: Deed['what'];
}

/** The sender of a request, as the audit log records it. */
export type Who = Pick<Caller, 'key_id' | 'key_name' | 'login_id' | 'request_id' | 'address'>;

/** The audit record of one request, while the request runs. */
export type Recording = ReturnType<Recorder['begin']>;
export type Recorder = ReturnType<typeof createAuditRecorder>;

/** Maximum number of recorded refusals of one key per minute. For further refusals only their number is recorded. */
const mostRefusals = 60;
/**
 * Audit records that cannot be written are logged. This is the maximum number of such log lines per minute for requests
 * that got the answer `unavailable`: while the database cannot be reached, every request would add one.
 */
const mostUnrecorded = 10;

/** Creates the audit recorder. `record` adds an audit row to a transaction, unless a row with the same id exists. */
export function createAuditRecorder(
  { history, record }: { history: History; record(journal: Journal, deed: Deed, id?: string): void },
  log: Logger,
) {
  const refusals = new LogLimiter<Deed>(mostRefusals, (first, left_out) => {
    const what = { left_out, since_request_id: first.request_id };
    void write([{ ...first, action: 'refusals', machine_id: null, what }], newTimedId('audit', now()));
  });
  const unrecorded = createUnrecordedLog(log);

  /** Adds a row for each of `deeds`. `before` is the number of rows that the request has already added. */
  function recordAll(journal: Journal, deeds: readonly Deed[], id: string, before: number): void {
    for (const [n, deed] of deeds.entries()) record(journal, deed, rowId(id, before + n));
  }

  /** Writes audit rows at the end of a request. A failure is only logged, as the request cannot be undone. */
  const write = (deeds: readonly Deed[], id: string, before = 0): Promise<void> =>
    history
      .write((journal) => recordAll(journal, deeds, id, before))
      .catch((error: unknown) => unrecorded.write(error, deeds));

  return {
    /** Begins a record. Each write calls `about` for details. */
    begin: (action: string, who: Who, about: () => AuditedRequest) =>
      createRecording({ recordAll, write, refusals }, action, who, about),
    /** Records how many refusals of the present minute have no row of their own. Called when the broker stops. */
    close(): void {
      refusals.close();
      unrecorded.close();
    },
  };
}

/** The functions with which the record of one request writes its audit rows. */
interface AuditWriter {
  recordAll(journal: Journal, deeds: readonly Deed[], id: string, before: number): void;
  write(deeds: readonly Deed[], id: string, before?: number): Promise<void>;
  refusals: LogLimiter<Deed>;
}

/** Creates the audit record of one request. */
function createRecording(
  { recordAll, write, refusals }: AuditWriter,
  action: string,
  who: Who,
  about: () => AuditedRequest,
) {
  const id = newTimedId('audit', now());
  let committed = false;
  let rows = 0;
  /** Machines with rows on disk that say `ok`, although further transactions of the change must follow. */
  let incomplete: MachineId[] = [];
  return {
    /** Adds the audit rows to the transaction in which the request makes its change. */
    commit(...[journal, made = {}, machines, more = false]: Parameters<Caller['commit']>): void {
      committed = true;
      journal.committed?.(() => {
        incomplete = more ? [...incomplete, ...(machines ?? [])] : [];
      });
      const request = about();
      // Each machine gets a row of its own, so the rows do not need the list of machines.
      const { machine_ids, ...rest } = request.what;
      const what = { ...(machines ? rest : request.what), ...made };
      const deeds = deedsOf(who, action, 'ok', { machines: machines ?? request.machines, what });
      recordAll(journal, deeds, id, rows);
      rows += deeds.length;
    },
    /** Writes the record at the end of the request, unless commit() has written it. Never rejects. */
    async settle(error?: unknown): Promise<void> {
      if (committed && error === undefined) return;
      const request = about();
      const deeds = deedsOf(who, action, resultOf(error), request);
      const [first] = deeds;
      // A refused request has changed nothing, so its record may be left out if its key has too many refusals.
      const refused = error instanceof AppError && error.status < 500;
      if (first && refused && !refusals.take(first.key_id, first)) return;
      // If the request failed after commit(), the rows of commit() may be on disk already. write() adds no row
      // whose id exists.
      if (incomplete.length === 0) return write(deeds, id);
      const more = deedsOf(who, action, resultOf(error), { ...request, machines: incomplete });
      await write([...deeds, ...more], id, rows);
    },
  };
}

const rowId = (id: string, row: number): string => (row === 0 ? id : `${id}_${row}`);

/** Logs audit records that could not be written. */
function createUnrecordedLog(log: Logger) {
  const limiter = new LogLimiter<undefined>(mostUnrecorded, (_first, left_out) =>
    log.error({ left_out }, 'audit records of further requests that got 503 could not be written'),
  );
  return {
    write(err: unknown, deeds: readonly Deed[]): void {
      const isRefused = deeds.every(({ result }) => result === 'unavailable');
      if (!isRefused || limiter.take('', undefined))
        log.error({ err, deeds }, 'an audit record could not be written');
    },
    close: () => limiter.close(),
  };
}

/** One row for each machine of a request; a single row if it has none. */
function deedsOf(who: Who, action: string, result: string, { machines, what }: AuditedRequest): Deed[] {
  const rows = machines.length > 0 ? machines : [null];
  return rows.map((machine_id) => ({ ...who, action, machine_id, what, result }));
}

function resultOf(error: unknown): string {
  if (error === undefined) return 'ok';
  return error instanceof AppError ? error.code : 'internal_error';
}

/** Names of the fields that are recorded; never content, input, environment values or secrets. */
const auditedFields = [
  ...['path', 'path_encoding', 'source', 'destination', 'mode', 'owner', 'group', 'recursive', 'overwrite'],
  ...['command', 'args', 'user', 'shell', 'signal', 'cron', 'timezone', 'enabled'],
  ...['name', 'scopes', 'machine_ids', 'tags', 'events', 'expires_at', 'expires_in', 'grace'],
];
const longestText = 4_096;
const longestList = 100;

/**
 * The recorded parts of a request: its machines, its other ids, and the audited fields as the client sent
 * them.
 */
export function auditOf(subjects: readonly Subject[], raw: RawInput, answer: Headers): AuditedRequest {
  const single = subjects.filter(({ listed }) => !listed);
  // Only a schedule with tags has an `ownKey`. Its machines are left out of the audit row, because there may be
  // thousands.
  const groups = single.flatMap(({ machines, ownKey }) =>
    machines && !ownKey ? [machines.map((id) => id.slice(0, 200))] : [],
  );
  // Ids are stored as the request contains them, except that long ids are cut.
  const machines = [...new Set(groups.flat())] as MachineId[];
  // A field of the body replaces the parameter with its name, as in RequestParser.parse().
  const parts = [raw.params, raw.body, raw.query].filter((part) => typeof part === 'object' && part !== null);
  const others = single.filter(({ noun }) => noun !== 'machine');
  const ids = others.map(({ noun, id }): [string, unknown] => [`${noun}_id`, cut(id)]);
  const fields = auditedFields.flatMap((name): [string, unknown][] => {
    const part = parts.find((one) => Object.hasOwn(one, name));
    const value = part && cut(Reflect.get(part, name) as unknown);
    return value === undefined ? [] : [[name, value]];
  });
  const what: Deed['what'] = Object.fromEntries([...ids, ...fields]);
  // A key may read the details of the row only if it may use all machines of the request. The audit log finds these
  // machines in `machine_ids`.
  if (groups.length > 1 && machines.length > 1) what.machine_ids = machines;
  // The header marks a repeated request with the same Idempotency-Key. Such a repeat has changed nothing.
  if (answer.has(replayed)) what.replayed = true;
  return { machines, what };
}

/**
 * Shortens a value for the audit log. A text is cut to `longestText` characters. A list is cut to `longestList` texts
 * that have at most `longestText` characters in all. Returns undefined for an object, because objects are not recorded.
 */
function cut(value: unknown): unknown {
  if (typeof value === 'string') return value.slice(0, longestText).toWellFormed();
  if (typeof value === 'number' || typeof value === 'boolean' || value === null) return value;
  if (!Array.isArray(value)) return undefined;
  let left = longestText;
  const texts = value.slice(0, longestList).filter((item) => typeof item === 'string');
  return texts.flatMap((text) => {
    const short = text.slice(0, Math.max(0, left)).toWellFormed();
    left -= text.length;
    return short === '' && text !== '' ? [] : [short];
  });
}

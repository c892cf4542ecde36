// Writes the audit record of a request: in the transaction of the change that it makes, else on its own.
import type { Deed } from '../../shared/api/audit.ts';
import type { Caller, Journal } from '../../shared/api/index.ts';
import type { MachineId } from '../../shared/api/route.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import { LogLimiter } from '../../shared/log-limiter.ts';
import type { Logger } from '../../shared/logger.ts';
import type { History } from '../history.ts';
import { replayed } from './idempotency.ts';
import type { RawInput, Subject } from './parse-request.ts';

/** Machines and details of a request, as far as they are parsed. */
export interface AuditedRequest {
  machines: readonly MachineId[];
  what: Deed['what'];
}

/** Who asks. */
export type Who = Pick<Caller, 'key_id' | 'key_name' | 'request_id' | 'address'>;

/** The audit record of one request. */
export type Recording = ReturnType<Recorder['begin']>;
export type Recorder = ReturnType<typeof createAuditRecorder>;

/** Refusals of one key that are written in a while; of the rest only the number. */
const mostRefusals = 60;
const minute = 60_000;

/** `record` adds a row to a commit; one whose id is there already is left as it is. */
export function createAuditRecorder(
  { history, record }: { history: History; record(journal: Journal, deed: Deed, id?: string): void },
  log: Logger,
) {
  const refusals = new LogLimiter<Deed>(mostRefusals, minute, (first, left_out) => {
    const what = { left_out, since_request_id: first.request_id };
    void write([{ ...first, action: 'refusals', machine_id: null, what }], newId('audit'));
  });

  function recordAll(journal: Journal, deeds: readonly Deed[], id: string): void {
    for (const [n, deed] of deeds.entries()) record(journal, deed, n === 0 ? id : `${id}_${n}`);
  }

  /** A failed write does not fail the request, whose work is done. */
  const write = (deeds: readonly Deed[], id: string): Promise<void> =>
    history
      .write((journal) => recordAll(journal, deeds, id))
      .catch((error: unknown) => log.error({ err: error, deeds }, 'an audit record could not be written'));

  return {
    /** `about` is asked when something is written; without `records` that is a failure alone. */
    begin(action: string, who: Who, about: () => AuditedRequest, records = true) {
      const id = newId('audit');
      let committed = false;
      return {
        /** Records it in the commit of what it does. */
        commit(...[journal, made = {}, machines]: Parameters<Caller['commit']>): void {
          committed = true;
          const request = about();
          // None of the rows needs the list.
          const { machine_ids, ...rest } = request.what;
          const what = { ...(machines ? rest : request.what), ...made };
          const deeds = deedsOf(who, action, 'ok', { machines: machines ?? request.machines, what });
          recordAll(journal, deeds, id);
        },
        /** It is over: writes what no commit took along. Never rejects. */
        async settle(error?: unknown): Promise<void> {
          if ((committed || !records) && error === undefined) return;
          const deeds = deedsOf(who, action, resultOf(error), about());
          const [first] = deeds;
          // A refused request did nothing.
          const refused = error instanceof AppError && error.status < 500;
          if (first && refused && !refusals.take(first.key_id, first)) return;
          // Under the ids of the commit: where that was made after all, this adds nothing.
          await write(deeds, id);
        },
      };
    },
    /** Reports how many refusals were left out. */
    close: () => refusals.close(),
  };
}

/** Every machine has a row of its own. */
function deedsOf(who: Who, action: string, result: string, { machines, what }: AuditedRequest): Deed[] {
  const rows = machines.length > 0 ? machines : [null];
  return rows.map((machine_id) => ({ ...who, action, machine_id, what, result }));
}

function resultOf(error: unknown): string {
  if (error === undefined) return 'ok';
  return error instanceof AppError ? error.code : 'internal_error';
}

/** Fields that are recorded; never content, input, values of the environment, or secrets. */
const auditedFields = [
  ...['path', 'path_encoding', 'source', 'destination', 'mode', 'owner', 'group', 'recursive', 'overwrite'],
  ...['command', 'args', 'user', 'shell', 'signal', 'cron', 'timezone', 'enabled'],
  ...['name', 'scopes', 'machine_ids', 'tags', 'events', 'expires_at', 'expires_in', 'grace'],
];
const longestText = 4_096;
const longestList = 100;

/** What is recorded of a request: the machines it is about, the other ids in it, and its parts as they came. */
export function auditOf(subjects: readonly Subject[], raw: RawInput, answer: Headers): AuditedRequest {
  const single = subjects.filter(({ listed }) => !listed);
  const groups = single.flatMap(({ machines }) => (machines ? [machines.map((id) => id.slice(0, 200))] : []));
  // Cut as they may be, they are still the ids that were named.
  const machines = [...new Set(groups.flat())] as MachineId[];
  const parts = [raw.params, raw.query, raw.body].filter((part) => typeof part === 'object' && part !== null);
  const others = single.filter(({ noun }) => noun !== 'machine');
  const ids = others.map(({ noun, id }): [string, unknown] => [`${noun}_id`, cut(id)]);
  const fields = auditedFields.flatMap((name): [string, unknown][] => {
    const part = parts.find((one) => Object.hasOwn(one, name));
    const value = part && cut(Reflect.get(part, name) as unknown);
    return value === undefined ? [] : [[name, value]];
  });
  const what: Deed['what'] = Object.fromEntries([...ids, ...fields]);
  // A record about several machines is readable by keys that reach them all.
  if (groups.length > 1 && machines.length > 1) what.machine_ids = machines;
  // A repeat did nothing.
  if (answer.has(replayed)) what.replayed = true;
  return { machines, what };
}

/** No longer than a row may be; undefined for what has no place there. */
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

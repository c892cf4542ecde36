// The header Idempotency-Key: of several requests with the same value, only one makes its change. Repeats get the
// answer of that request, even after a restart of the broker.
import { createHash, hash } from 'node:crypto';
import type { Route } from '../../shared/api/route.ts';
import type { Caller, Content } from '../../shared/api/route-table.ts';
import { now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type {
  History,
  HistoryTransaction,
  OutboxEntry,
  Row,
  RowReader,
} from '../history/history-database.ts';

/** Response header that marks the answer to a repeat. */
export const replayed = 'Idempotency-Replayed';

/**
 * Answers a repeat of a request that has created an object. The caller gets the first answer if this answer is stored
 * and the caller may still use all machines of the object. Otherwise the caller gets the present state of the object.
 * Throws forbidden if the caller may use none of the machines.
 */
export type Recall = (madeId: string, caller: Caller, first?: unknown) => unknown;

/** A request to a route that accepts an Idempotency-Key. */
export interface KeyedRequest {
  route: Route;
  caller: Caller;
  /** The Idempotency-Key; undefined if there is none. */
  key: string | undefined;
  path: string;
  query: string;
  body: unknown;
  /** Content of a body that is not JSON. */
  content: Content<unknown> | undefined;
  run(): unknown;
  recall: Recall;
}

interface MadeEntry extends OutboxEntry {
  kind: 'idempotency';
  owner: string;
  key: string;
  resource_id: string;
}

/** The stored result of an earlier request: its answer, and the id of the object that it created, if any. */
interface Earlier {
  answer: unknown;
  /** Hash of the form fields of an upload; null if no hash is stored. */
  fields: string | null;
  madeId: string | undefined;
}

/** The result that is stored when a request has ended. */
interface End {
  /** The answer; undefined if it is not stored. */
  answer: string | undefined;
  /** Hash of the form fields of an upload, otherwise null. */
  fields: string | null;
  /** Id of the object that the request has created; null if it has created none or has failed. */
  madeId: string | null;
}

const keepMs = 24 * 3_600_000;
/**
 * Length of the longest answer that is stored, in characters. If the first answer was longer, repeats get the present
 * state of the object.
 */
const largestAnswer = 64 * 1024;

const tables = [
  `CREATE TABLE idempotency (
    id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, key TEXT NOT NULL, fingerprint TEXT NOT NULL,
    created_at INTEGER NOT NULL, resource_id TEXT, answer TEXT, PRIMARY KEY (owner, key)
  );
  CREATE INDEX idempotency_by_time ON idempotency (created_at)`,
  // Id of the broker that runs the request; null if the request has ended or there is only one broker.
  'ALTER TABLE idempotency ADD COLUMN running TEXT',
  // Hash of the form fields of an upload; null for other requests, and for uploads to earlier versions of the broker.
  'ALTER TABLE idempotency ADD COLUMN fields TEXT',
];
const livingBroker = 'SELECT 1 AS n FROM brokers WHERE id = ? AND lease_until > clock_timestamp()';

const form = /^[\x21-\x7e]{1,255}$/;

export class Idempotency {
  readonly #history: History;
  readonly #underWay = new Set<string>();
  /** Ids of ended requests whose rows still name this broker in `running`, because the database did not answer. */
  readonly #unreleased = new Set<string>();
  /** Id of this broker if several brokers share the database, otherwise null. */
  readonly #brokerId: string | null;

  private constructor(history: History, brokerId: string | null) {
    this.#history = history;
    this.#brokerId = brokerId;
  }

  static async open(history: History, brokerId: string | null = null): Promise<Idempotency> {
    await history.migrate('idempotency', tables);
    history.retain({ table: 'idempotency', column: 'created_at', keepMs });
    history.onEntry('idempotency', ({ owner, key, resource_id }: MadeEntry, transaction) => {
      const sql = 'UPDATE idempotency SET resource_id = ? WHERE owner = ? AND key = ?';
      transaction.run(sql, resource_id, owner, key);
    });
    return new Idempotency(history, brokerId);
  }

  /**
   * Runs a request, or answers it as a repeat if its Idempotency-Key was used before. Throws conflict while the first
   * request runs, or if its answer had a secret; idempotency_mismatch if the first request was different.
   */
  async answer(request: KeyedRequest): Promise<unknown> {
    const { route, caller, key, path, content, recall } = request;
    if (key === undefined) return request.run();
    if (!form.test(key))
      throw new AppError('invalid_request', 'Idempotency-Key must be 1 to 255 visible ASCII characters');
    // The fingerprint of an upload has no form fields, because these may arrive after the file. A repeated upload is
    // compared later, by a hash of its fields and its file.
    const body = route.accepts ? { query: request.query } : (request.body ?? null);
    const fingerprint = hash('sha256', JSON.stringify({ method: route.method, path, body }));
    const id = hash('sha256', `${caller.key_id}\n${key}`);
    const earlier = await this.#begin(id, caller.key_id, key, fingerprint);
    if (!earlier) return this.#run(id, key, request);
    const { answer, madeId } = earlier;
    if (answer === undefined && route.idempotency === 'secret') {
      const message = `the first request with this Idempotency-Key succeeded, but its answer contained a secret of ${madeId} and cannot be sent again; send the request with a new Idempotency-Key, and delete ${madeId} if the first request created it`;
      throw new AppError('conflict', message, { id: madeId });
    }
    if (content && answer !== undefined) await assertSame(content, earlier);
    caller.headers.set(replayed, 'true');
    return madeId === undefined ? answer : recall(madeId, caller, answer);
  }

  /**
   * Stores that the requests in #unreleased have ended, because that write failed at their end. Until it succeeds,
   * other brokers refuse repeats of these requests.
   */
  async release(): Promise<void> {
    const ids = [...this.#unreleased];
    if (ids.length === 0) return;
    await this.#history.write((transaction) => {
      // A repeat may have begun at this broker meanwhile.
      const ended = ids.filter((id) => !this.#underWay.has(id));
      const sql =
        'UPDATE idempotency SET running = NULL WHERE running = ? AND id IN (SELECT value FROM json_each(?))';
      transaction.run(sql, this.#brokerId, JSON.stringify(ended));
    });
    for (const id of ids) this.#unreleased.delete(id);
  }

  /**
   * Returns the result of the earlier request with this Idempotency-Key. If the Idempotency-Key is new, stores it and
   * returns undefined.
   */
  async #begin(id: string, owner: string, key: string, fingerprint: string): Promise<Earlier | undefined> {
    // One transaction both looks for an earlier request and stores this one, so only the first of two requests with the
    // same Idempotency-Key runs.
    let isNew = false;
    const begun = this.#history.write(async (transaction): Promise<Earlier | undefined> => {
      const earlier = await this.#earlier(id, fingerprint, transaction);
      if (earlier) return earlier;
      const row = { id, owner, key, fingerprint, created_at: now(), resource_id: null, answer: null };
      transaction.put('idempotency', 'id', { ...row, running: this.#brokerId });
      this.#underWay.add(id);
      isNew = true;
      return undefined;
    });
    return begun.catch((error: unknown) => {
      // This request does not run, because it was refused or could not be stored. If it has added the id to #underWay,
      // it removes the id again. Otherwise the id belongs to an earlier request, which may still be running.
      if (isNew) this.#underWay.delete(id);
      throw error;
    });
  }

  /**
   * Reads the stored result of the first request. Returns undefined if the Idempotency-Key is new, or if a crash ended
   * the first request before it created anything. Throws conflict while the first request is running, and
   * idempotency_mismatch if it was different.
   */
  async #earlier(id: string, fingerprint: string, transaction: RowReader): Promise<Earlier | undefined> {
    const sql = 'SELECT * FROM idempotency WHERE id = ? AND created_at > ?';
    const row = await transaction.get(sql, id, now() - keepMs);
    if (!row) return undefined;
    if (row.fingerprint !== fingerprint)
      throw new AppError(
        'idempotency_mismatch',
        'this Idempotency-Key was used for another request; use a new Idempotency-Key',
      );
    if (this.#underWay.has(id) || (await this.#runsElsewhere(row, transaction))) {
      const message = 'the first request with this Idempotency-Key is still running; try again later';
      throw new AppError('conflict', message, { under_way: true });
    }
    const answer: unknown = row.answer ? JSON.parse(String(row.answer)) : undefined;
    const madeId = row.resource_id ? String(row.resource_id) : undefined;
    const fields = row.fields ? String(row.fields) : null;
    return answer === undefined && madeId === undefined ? undefined : { answer, madeId, fields };
  }

  /** True if another broker runs the request, and the lease of that broker has not ended. */
  async #runsElsewhere({ running }: Row, reader: RowReader): Promise<boolean> {
    if (typeof running !== 'string' || running === this.#brokerId) return false;
    return (await reader.get(livingBroker, running)) !== undefined;
  }

  async #run(id: string, key: string, { route, caller, content, run }: KeyedRequest): Promise<unknown> {
    const { commit } = caller;
    let made: string | undefined;
    const end: End = { answer: undefined, fields: null, madeId: null };
    caller.commit = (journal, names = {}, machines, more = false) => {
      commit(journal, names, machines, more);
      if (more) return;
      const [resource_id] = Object.values(names);
      if (resource_id === undefined) return;
      made = resource_id;
      const entry: MadeEntry = { kind: 'idempotency', owner: caller.key_id, key, resource_id };
      journal.append(entry);
    };
    try {
      const reply = await run();
      end.madeId = made ?? null;
      const text = JSON.stringify(reply);
      // If an object was created, but the client is gone or the answer too long, no answer is stored: repeats get the
      // object's present state.
      const later = made !== undefined && (caller.signal.aborted || text.length > largestAnswer);
      if (route.idempotency === 'replay' && !later) end.answer = text;
      if (content) end.fields = hashOf(content);
      return reply;
    } finally {
      // The request counts as running until its answer is stored. Otherwise a repeat could arrive before the answer is
      // stored, and find neither a running request nor an answer.
      await this.#history
        .write((transaction) => this.#store(id, end, transaction))
        .catch((error: unknown) => {
          if (this.#brokerId !== null) this.#unreleased.add(id);
          throw error;
        })
        .finally(() => this.#underWay.delete(id));
    }
  }

  /** Stores the answer. If there is no answer and nothing was created, the Idempotency-Key can be used again. */
  #store(id: string, { answer, fields, madeId }: End, transaction: HistoryTransaction): void {
    if (answer === undefined && madeId === null) {
      transaction.run('DELETE FROM idempotency WHERE id = ? AND resource_id IS NULL', id);
      transaction.run('UPDATE idempotency SET running = NULL WHERE id = ?', id);
    } else {
      // The entry with the object's id may still wait in the outbox, so the id is written here too.
      const sql = `UPDATE idempotency SET answer = ?, fields = ?, resource_id = coalesce(resource_id, ?), running = NULL
        WHERE id = ?`;
      transaction.run(sql, answer ?? null, fields, madeId, id);
    }
  }
}

/** Returns a hash of the form fields. Call this after the last chunk of the content. */
function hashOf(content: Content<unknown>): string {
  return hash('sha256', JSON.stringify(content.fields()) ?? '');
}

/**
 * Throws idempotency_mismatch if the repeat uploads other content or other form fields than the first request. The
 * content is compared by its SHA-256, which every route that accepts content includes in its answer.
 */
async function assertSame(content: Content<unknown>, { answer, fields }: Earlier): Promise<void> {
  const digest = createHash('sha256');
  for await (const chunk of content.chunks) digest.update(chunk);
  const sha256 = digest.digest('hex');
  const isSame =
    typeof answer === 'object' && answer !== null && 'sha256' in answer && answer.sha256 === sha256;
  if (isSame && (fields === null || fields === hashOf(content))) return;
  throw new AppError(
    'idempotency_mismatch',
    'this Idempotency-Key was used for other content or other form fields; use a new Idempotency-Key',
    { sha256 },
  );
}

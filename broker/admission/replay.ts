// Runs a handler at most once per Idempotency-Key, or answers a repeat with what the first request got.
import { createHash } from 'node:crypto';
import type { Caller, Content } from '../../shared/api/index.ts';
import type { Route } from '../../shared/api/route.ts';
import { AppError } from '../../shared/errors.ts';
import type { Attempt, Idempotency } from './idempotency.ts';

/** The header of an answer that was given before. */
export const replayed = 'Idempotency-Replayed';

/** A request that carries a key, and the two ways to answer it. */
export interface Keyed {
  route: Route;
  caller: Caller;
  key: string;
  path: string;
  query: string;
  body: unknown;
  /** Of a body that is not JSON. */
  content: Content<unknown> | undefined;
  run(): unknown;
  made: Made;
}

/** What requests to a route have made. */
export interface Made {
  /** How it is now. Throws where that is not for the caller to know. */
  get(id: string, caller: Caller): unknown;
  /** Whether the caller reaches every machine that the first answer may tell of. */
  reachedBy(caller: Caller, id: string): boolean;
}

/** The reply; a header says so where it is that of an earlier request. */
export async function once(idempotency: Idempotency, keyed: Keyed): Promise<unknown> {
  const { route, caller, key, path } = keyed;
  // A form's fields may come late, and its file is compared by what was made of it.
  const body = route.accepts ? { query: keyed.query } : (keyed.body ?? null);
  const outcome = await idempotency.begin(caller.key_id, key, { method: route.method, path, body });
  if ('attempt' in outcome) return attempt(outcome.attempt, keyed);
  if ('answer' in outcome) {
    const { answer, madeId } = outcome;
    if (keyed.content) await demandSame(keyed.content, answer);
    caller.headers.set(replayed, 'true');
    if (madeId === null || keyed.made.reachedBy(caller, madeId)) return answer;
    // Its key has lost some of that since: it hears what it may know now.
    return keyed.made.get(madeId, caller);
  }
  if (route.idempotency === 'secret') {
    throw new AppError('conflict', 'this was made already, and its secret is shown once only', {
      id: outcome.madeId,
    });
  }
  // A crash came between the commit and the answer: tell how what was made is now.
  caller.headers.set(replayed, 'true');
  return keyed.made.get(outcome.madeId, caller);
}

/** A longer answer is not kept: a repeat gets how what was made is then. */
const largestAnswer = 64 * 1024;

async function attempt(attempt: Attempt, { route, caller, run }: Keyed): Promise<unknown> {
  let made = false;
  const { commit } = caller;
  caller.commit = (journal, names = {}, machines) => {
    commit(journal, names, machines);
    const [id] = Object.values(names);
    if (id === undefined) return;
    made = true;
    attempt.made(journal, id);
  };
  try {
    const reply = await run();
    // Whoever did not wait for the answer is to get how it is then.
    const unheard = caller.signal.aborted;
    const later = made && (unheard || JSON.stringify(reply).length > largestAnswer);
    if (route.idempotency === 'replay' && !later) await attempt.answered(reply);
    else await attempt.released();
    return reply;
  } catch (error) {
    await attempt.released();
    throw error;
  }
}

/** Every route that takes content answers with its digest. */
async function demandSame({ chunks }: Content<unknown>, answer: unknown): Promise<void> {
  const hash = createHash('sha256');
  for await (const chunk of chunks) hash.update(chunk);
  const sha256 = hash.digest('hex');
  if (typeof answer === 'object' && answer !== null && 'sha256' in answer && answer.sha256 === sha256) return;
  throw new AppError('idempotency_mismatch', 'this Idempotency-Key was used for other content', { sha256 });
}

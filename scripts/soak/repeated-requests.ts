// Sends the requests of the soak tests. Repeats each request until a broker gives a final answer.
import { randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';

export interface Access {
  url: string;
  key: string;
}

export interface Answer {
  status: number;
  body: { data?: unknown; error?: { code: string; message: string; details: Record<string, unknown> } };
}

const betweenMs = 300;
const answerMs = 20_000;
const mostTries = 300;

/** Sends a POST request with an Idempotency-Key until the answer is final. Calls `count` before each repetition. */
export async function insist(
  { url, key }: Access,
  path: string,
  body: object,
  count: () => void = () => {},
): Promise<Answer> {
  const headers = {
    Authorization: `Bearer ${key}`,
    'Content-Type': 'application/json',
    'Idempotency-Key': randomUUID(),
    Connection: 'close',
  };
  for (;;) {
    try {
      const text = JSON.stringify(body);
      const signal = AbortSignal.timeout(answerMs);
      const answer = await fetch(`${url}/api/v1${path}`, { method: 'POST', headers, body: text, signal });
      const received = (await answer.json()) as Answer['body'];
      const underWay = answer.status === 409 && received.error?.details.under_way === true;
      // A broker refuses the first request of a connection that has sent nothing for 15 s. This can happen, because
      // fetch may open a connection before it needs one.
      const isLate = received.error?.message.includes('send the request again') ?? false;
      if (answer.status !== 503 && answer.status !== 500 && !underWay && !isLate)
        return { status: answer.status, body: received };
    } catch {
      // The broker was killed before or during its answer. The loop sends the request again.
    }
    count();
    await sleep(betweenMs);
  }
}

export async function get({ url, key }: Access, path: string): Promise<Answer['body']> {
  for (let tries = 0; ; tries += 1) {
    try {
      const headers = { Authorization: `Bearer ${key}`, Connection: 'close' };
      const signal = AbortSignal.timeout(answerMs);
      const answer = await fetch(`${url}/api/v1${path}`, { headers, signal });
      if (answer.ok) return (await answer.json()) as Answer['body'];
    } catch {
      // The broker was killed before or during its answer. The loop sends the request again.
    }
    if (tries > mostTries) throw new Error(`GET ${path} is not answered`);
    await sleep(betweenMs);
  }
}

export const itemsOf = (answer: Answer['body']): Record<string, unknown>[] =>
  Array.isArray(answer.data) ? (answer.data as Record<string, unknown>[]) : [];

/** Returns the id of the created object. Throws if the answer contains no id. */
export function idOf(answer: Answer, what: string): string {
  const { id } = (answer.body.data ?? answer.body.error?.details ?? {}) as { id?: unknown };
  if (typeof id !== 'string') throw new Error(`${what} was answered with ${JSON.stringify(answer)}`);
  return id;
}

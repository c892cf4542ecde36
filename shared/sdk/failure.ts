// What a call rejects with: a refusal that the broker told, or that no answer of the broker came.

import { now } from '../clock.ts';

/**
 * A failure told by the broker, with its code, HTTP status and request id. With the code `no_answer` none came: the
 * connection failed (status 0), or something between answered in its place.
 */
export class FarhandError extends Error {
  override readonly name = 'FarhandError';
  readonly code: string;
  readonly status: number;
  readonly details: Readonly<Record<string, unknown>>;
  readonly requestId: string;
  /** Milliseconds after which the broker would like to be asked again. */
  readonly retryAfter: number | undefined;

  constructor(
    status: number,
    requestId: string,
    error: { code: string; message: string; details: Record<string, unknown> },
    { retryAfter, cause }: { retryAfter?: number | undefined; cause?: unknown } = {},
  ) {
    super(error.message, cause === undefined ? undefined : { cause });
    this.code = error.code;
    this.details = error.details;
    this.status = status;
    this.requestId = requestId;
    this.retryAfter = retryAfter;
  }
}

/** Of an answer that is no success, or none of the broker's. */
export function failureOf(response: Response, text: string): FarhandError {
  const { status, headers } = response;
  const requestId = headers.get('x-request-id') ?? '';
  const retryAfter = waitIn(headers.get('retry-after') ?? '');
  const message = `something that is not the broker answered ${status}`;
  const told = toldIn(text) ?? { code: 'no_answer', message, details: {} };
  return new FarhandError(status, requestId, told, { retryAfter });
}

/** Seconds, or a date (RFC 9110, section 10.2.3). */
function waitIn(text: string): number | undefined {
  const ms = /^\d+$/.test(text) ? Number(text) * 1000 : Math.max(0, Date.parse(text) - now());
  return Number.isNaN(ms) ? undefined : ms;
}

function toldIn(text: string) {
  const error = propertyOf(parsed(text), 'error');
  const [code, message, details] = ['code', 'message', 'details'].map((name) => propertyOf(error, name));
  if (typeof code !== 'string' || typeof message !== 'string') return undefined;
  return { code, message, details: { ...(typeof details === 'object' && details) } };
}

/** No answer, or not all of it. Of the address only the origin is told. */
export function noAnswer(origin: string, cause: unknown): FarhandError {
  const why = reasonOf(cause) ?? 'the connection failed';
  return new FarhandError(
    0,
    '',
    { code: 'no_answer', message: `no answer from ${origin}: ${why}`, details: {} },
    { cause },
  );
}

/** The system's word for what went wrong, where fetch passes it on (Node does). */
export function reasonOf(error: unknown): string | undefined {
  const code = propertyOf(error, 'code') ?? propertyOf(propertyOf(error, 'cause'), 'code');
  return typeof code === 'string' ? code : undefined;
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function propertyOf(value: unknown, name: string): unknown {
  return typeof value === 'object' && value !== null ? Reflect.get(value, name) : undefined;
}

/** The envelope of spec section 2.1; what is in it the broker has parsed with the same schemas. */
export function envelopeOf(text: string): { data: unknown; meta: object } | undefined {
  const value = parsed(text);
  if (typeof value !== 'object' || value === null || !('data' in value)) return undefined;
  const meta = propertyOf(value, 'meta');
  return { data: value.data, meta: { ...(typeof meta === 'object' && meta) } };
}

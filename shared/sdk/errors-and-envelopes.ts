// FarhandError, the error of every SDK call, and functions that parse the answers of the broker.

import { now } from '../clock.ts';

/**
 * An error answer of the broker. The code `no_answer` means that the connection failed (status 0), or that a proxy
 * answered instead of the broker.
 */
export class FarhandError extends Error {
  override readonly name = 'FarhandError';
  readonly code: string;
  readonly status: number;
  readonly details: Readonly<Record<string, unknown>>;
  readonly requestId: string;
  /** Retry-After of the answer, in milliseconds. */
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

/**
 * Creates the error for an error answer of the broker, or of a proxy between this client and the broker. `text` is the
 * answer's body.
 */
export function failureOf(response: Response, text: string): FarhandError {
  const { status, headers } = response;
  const requestId = headers.get('x-request-id') ?? '';
  const retryAfter = retryAfterMs(headers.get('retry-after') ?? '');
  const message = `an answer with status ${status} did not come from the broker: check the address and any proxy in between`;
  const error = errorIn(text) ?? { code: 'no_answer', message, details: {} };
  return new FarhandError(status, requestId, error, { retryAfter });
}

/** Milliseconds of a Retry-After header, which contains seconds or a date (RFC 9110, section 10.2.3). */
export function retryAfterMs(text: string): number | undefined {
  const ms = /^\d+$/.test(text) ? Number(text) * 1000 : Math.max(0, Date.parse(text) - now());
  return Number.isNaN(ms) ? undefined : ms;
}

function errorIn(text: string) {
  const error = propertyOf(parsed(text), 'error');
  const [code, message, details] = ['code', 'message', 'details'].map((name) => propertyOf(error, name));
  if (typeof code !== 'string' || typeof message !== 'string') return undefined;
  return { code, message, details: { ...(typeof details === 'object' && details) } };
}

/** Creates the error for a missing or incomplete answer. Its message names only the origin of the URL. */
export function noAnswer(url: string, cause: unknown): FarhandError {
  const message = `no answer from ${new URL(url).origin}: ${reasonOf(cause) ?? 'the connection failed'}`;
  return new FarhandError(0, '', { code: 'no_answer', message, details: {} }, { cause });
}

/** Returns the system error code of a failed fetch, such as ECONNREFUSED; undefined where the platform reports none. */
export function reasonOf(error: unknown): string | undefined {
  const code = propertyOf(error, 'code') ?? propertyOf(propertyOf(error, 'cause'), 'code');
  return typeof code === 'string' ? code : undefined;
}

/** Returns the value of a JSON text; undefined for text that is not JSON. */
export function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** Returns a property of any value; undefined if the value is no object. */
export function propertyOf(value: unknown, name: string): unknown {
  return typeof value === 'object' && value !== null ? Reflect.get(value, name) : undefined;
}

/**
 * Parses the body of a successful answer. The data is not validated, because the broker has validated it by the same
 * schemas.
 */
export function envelopeOf(text: string): { data: unknown; meta: object } | undefined {
  const value = parsed(text);
  if (typeof value !== 'object' || value === null || !('data' in value)) return undefined;
  const meta = propertyOf(value, 'meta');
  return { data: value.data, meta: { ...(typeof meta === 'object' && meta) } };
}

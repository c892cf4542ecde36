// Reads a JSON body: limited before it is buffered, and refused when it is nested too deep to be kept.
import { isUtf8 } from 'node:buffer';
import type { IncomingHttpHeaders, IncomingMessage } from 'node:http';
import getRawBody from 'raw-body';
import type { Budget } from '../../shared/budget.ts';
import { after } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';

/** Time for all of it. */
const maxMs = 300_000;
/** Smaller ones are not counted. */
const smallBytes = 64 * 1024;
const maxDepth = 32;
/** The fields of the largest schema, 256 variables for a command, and a hundred that are none. */
const maxFields = 400;
const [quote, backslash, colon, openBrace, closeBrace, openBracket, closeBracket] = Buffer.from('"\\:{}[]');

/**
 * The parsed body; undefined when there is none. A large one has its share of the budget until the request is over.
 * Throws invalid_request, payload_too_large or unavailable.
 */
export async function readJson(
  request: IncomingMessage,
  limit: number,
  budget: Budget,
  over: AbortSignal,
): Promise<unknown> {
  const length = request.headers['content-length'];
  if (length === '0' || (length === undefined && request.headers['transfer-encoding'] === undefined))
    return undefined;
  // One of unknown length may become as long as it may.
  const size = Math.min(Number(length ?? limit), limit);
  if (size > smallBytes) whenOver(over, budget.take(size));
  const tooSlow = after(maxMs, () => request.destroy());
  const bytes = await getRawBody(request, { limit, length: length ?? null })
    .catch((error: unknown) => {
      const tooLarge = error instanceof Error && 'status' in error && error.status === 413;
      throw tooLarge
        ? new AppError('payload_too_large', `the body must not exceed ${limit} bytes`, { limit })
        : new AppError('invalid_request', 'the body did not arrive whole');
    })
    .finally(tooSlow);
  return bytes.length === 0 ? undefined : parse(bytes, request.headers);
}

/** Gives back at the end of its request what was taken for it. */
export function whenOver(over: AbortSignal, release: () => void): void {
  if (over.aborted) release();
  else over.addEventListener('abort', release, { once: true });
}

/** An empty body needs no type; anything else must be JSON as it is, not compressed. */
function parse(bytes: Buffer, headers: IncomingHttpHeaders): unknown {
  const type = headers['content-type']?.split(';')[0]?.trim().toLowerCase();
  if (type !== undefined && type !== 'application/json' && !type.endsWith('+json')) {
    throw new AppError('invalid_request', 'send the body as JSON, with Content-Type: application/json');
  }
  if (headers['content-encoding'] !== undefined && headers['content-encoding'] !== 'identity') {
    throw new AppError('invalid_request', 'send the body without Content-Encoding');
  }
  if (!isUtf8(bytes)) throw new AppError('invalid_request', 'the body is not valid UTF-8');
  refuseTangled(bytes);
  try {
    return JSON.parse(bytes.toString('utf8'));
  } catch {
    throw new AppError('invalid_request', 'the body is not valid JSON');
  }
}

/** Refuses what would be costly to parse, check and keep, by one look at the bytes: too deep, or too many fields. */
export function refuseTangled(bytes: Buffer): void {
  let depth = 0;
  let fields = 0;
  let quoted = false;
  for (let at = 0; at < bytes.length; at += 1) {
    const byte = bytes[at];
    if (byte === quote) quoted = !quoted;
    else if (quoted) at += byte === backslash ? 1 : 0;
    else if (byte === openBrace || byte === openBracket) depth += 1;
    else if (byte === closeBrace || byte === closeBracket) depth -= 1;
    else if (byte === colon) fields += 1;
    if (depth > maxDepth)
      throw new AppError('invalid_request', `the body is nested deeper than ${maxDepth} levels`);
    if (fields > maxFields) {
      const message = `must not hold more than ${maxFields} fields`;
      throw new AppError('validation_failed', `body: ${message}`, { issues: [{ path: '', message }] });
    }
  }
}

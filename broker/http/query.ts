// A request's query and headers as an address has them, before they are parsed.
import type { IncomingHttpHeaders } from 'node:http';
import { AppError } from '../../shared/errors.ts';

/** A query as strings; a parameter given twice becomes an array, which no schema takes. */
export function queryOf(text: string): Record<string, unknown> {
  if (text === '') return {};
  refuseForeign(text);
  const values = new Map<string, string[]>();
  for (const [name, value] of new URLSearchParams(text)) {
    const same = values.get(name);
    if (same) same.push(value);
    else values.set(name, [value]);
  }
  return Object.fromEntries([...values].map(([name, all]) => [name, all.length > 1 ? all : all[0]]));
}

/** Bytes that are not UTF-8 would silently become others. */
function refuseForeign(text: string): void {
  try {
    decodeURIComponent(text);
  } catch {
    throw new AppError(
      'invalid_request',
      'query: must be UTF-8, percent-encoded; for other paths use path_encoding',
    );
  }
}

/** The headers a route names, by their names with underscores. */
export function headersOf(
  headers: IncomingHttpHeaders,
  known: Record<string, unknown>,
): Record<string, unknown> {
  const names = Object.keys(known).filter((name) => headers[name.replaceAll('_', '-')] !== undefined);
  return Object.fromEntries(names.map((name) => [name, headers[name.replaceAll('_', '-')]]));
}

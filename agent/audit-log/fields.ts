// Which fields of a call the audit log shows: what it was about, never contents, input or environment.

/** Fields of a log line, named as people query them with jq. */
export type Fields = Record<string, unknown>;

/** The request fields that are logged, of any method. A new field of a request is private until it is named here. */
const loggable: ReadonlySet<string> = new Set([
  ...['id', 'client_id', 'path', 'source', 'destination', 'command', 'user', 'cwd', 'mode', 'owner', 'group'],
  ...['signal', 'name', 'recursive', 'ids', 'args'],
]);
/** Longest text in a line: a command may be a whole script. */
const longest = 4096;
const mostItems = 64;

const text = (value: string): string => (value.length > longest ? `${value.slice(0, longest)}…` : value);

function loggedAs(value: unknown): unknown {
  if (Buffer.isBuffer(value)) return text(value.toString());
  if (typeof value === 'string') return text(value) || undefined;
  // The mode of a file.
  if (typeof value === 'number') return value.toString(8).padStart(4, '0');
  if (!Array.isArray(value)) return value || undefined;
  if (value.length === 0) return undefined;
  return [...value.slice(0, mostItems).map(loggedAs), ...(value.length > mostItems ? ['…'] : [])];
}

/** What to log of a decoded request, or of the first where there are many; undefined values are left out of a line. */
export function fieldsOf(request: unknown): Fields {
  // Every request is a message; that of an upload or attachment has `open`, that of a process or terminal `spec`.
  const { open, spec, ...own } = request as Fields & { open?: object | null; spec?: object | null };
  const { program, content, ...all }: Fields = { ...own, ...open, ...spec };
  const shown = { ...all, command: all.command ?? program };
  const logged = Object.entries(shown).filter(([field]) => loggable.has(field));
  return {
    ...Object.fromEntries(logged.map(([field, value]) => [field, loggedAs(value)])),
    in_contents: content ? true : undefined,
  };
}

interface Response {
  /** Only processes and terminals answer with events. */
  event?: { exit?: { outcome?: string; exit_code?: number; signal?: string } | null } | null;
}

/** What a response says of a process that has ended. */
export function exitOf(response: unknown): Fields | undefined {
  const { event } = response as Response;
  if (!event?.exit) return undefined;
  const { outcome, exit_code, signal } = event.exit;
  const ended = outcome?.replace('PROCESS_OUTCOME_', '').toLowerCase();
  return { outcome: ended, exit_code, signal: signal || undefined };
}

// The prose of the reference page: its introduction, and a description of each group of routes.
import { codes } from '../../shared/errors.ts';

/** Display name and description of each resource, by its name in the table of routes. */
export const tags: Readonly<Record<string, readonly [name: string, description: string]>> = {
  machines: ['Machines', 'The computers that run an agent: list, inspect, rename, tag and remove them.'],
  joinTokens: ['Join tokens', 'The secrets that new machines join with.'],
  files: ['Files', 'Files and directories on machines: read, write, transfer, search and watch them.'],
  commands: ['Commands', 'Programs on machines: run, follow, feed, signal and cancel them.'],
  batches: ['Batches', 'One command on many machines.'],
  schedules: ['Schedules', 'Commands by cron expression, and the history of their runs.'],
  sessions: ['Sessions', 'Terminals on machines that outlive their clients and short losses of the link.'],
  events: ['Events', 'The log of what happened: read it, or follow it as it grows.'],
  keys: ['API keys', 'The keys that clients authenticate with, their scopes and the machines they reach.'],
  webhooks: ['Webhooks', 'Subscriptions that send events to an address of yours, and their deliveries.'],
  audit: ['Audit log', 'The append-only record of every call that changes or runs something.'],
  packages: ['Packages', 'The install script and the agent packages for new machines.'],
  service: ['Service', 'Version, health and metrics of the broker, and this document.'],
};

function codeTable(): string {
  const byStatus = Map.groupBy(Object.entries(codes), ([, status]) => status);
  const rows = [...byStatus].map(
    ([status, found]) => `| ${status} | ${found.map(([code]) => `\`${code}\``).join(', ')} |`,
  );
  return `| status | codes |\n|---|---|\n${rows.join('\n')}`;
}

/** Markdown; each heading becomes a section of the page. */
export const introduction = `Farhand controls remote machines over one REST API: metrics, files, commands, schedules and terminals on every
machine that runs an agent.

# Authentication

Send an API key with every request:

\`\`\`
curl -H "Authorization: Bearer service_apikey_…" https://farhand.example.org/api/v1/machines
\`\`\`

Create the first key on the broker’s machine with \`farhand auth create-key --data-dir DIR\`, and others with
\`POST /api-keys\`. A key has scopes, and reaches all machines or some. Each operation names the scope it needs. Without a
valid key the answer is 401, and 403 if the key lacks the scope or does not reach the machine.

# Envelope

A success is \`{"data": …, "meta": {"request_id": …, "timestamp": …}}\`. The same id is in the header \`X-Request-Id\` and in
the logs of broker and agent. Send your own id in that header to trace a request. Times are ISO 8601 in UTC; durations are
milliseconds, unless a field says seconds.

# Paging

A list takes \`limit\` (1 to 100, default 20), \`offset\` (default 0) and \`sort\` (\`-created_at\`: newest first). Its \`meta\`
also has \`total\`, \`limit\`, \`offset\` and \`has_more\`. The header \`Link\` with \`rel="next"\` is the address of the next
page. Filter by the fields of the items, and by time with \`since\` and \`until\`. An unknown parameter is refused.

# Errors

A failure is \`{"error": {"code": …, "message": …, "details": {…}}}\`. Decide by \`code\`; \`message\` says what to do next.
A 503 or 429 with the header \`Retry-After\` may be repeated after so many seconds. Bad query parameters are 400, a body that
breaks its schema is 422 with \`details.issues\`.

${codeTable()}

# Idempotency

A POST that creates or starts something takes the header \`Idempotency-Key\`, a text of at most 255 characters. A repeat with
the same key and body within 24 hours gets the first answer, even after a restart of the broker. With another body it is
\`idempotency_mismatch\`, and while the first request runs \`conflict\`. An answer that holds a secret is never stored: its
repeat is \`conflict\` with the id of the object.

# Rate limits

Limits are off unless the broker was started with \`--rate-limit\`. Then every answer has \`X-RateLimit-Limit\`,
\`X-RateLimit-Remaining\` and \`X-RateLimit-Reset\`, and a request over the limit is 429 \`rate_limited\`.
`;

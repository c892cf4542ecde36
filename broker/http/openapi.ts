// Builds the OpenAPI 3.1 document of the REST API from the route table.
import { readFileSync } from 'node:fs';
import { STATUS_CODES } from 'node:http';
import { join } from 'node:path';
import { z } from 'zod';
import {
  createDocument,
  type ZodOpenApiOperationObject,
  type ZodOpenApiResponseObject,
  type ZodOpenApiResponsesObject,
} from 'zod-openapi';
import { deliveryBody, webhookTypes } from '../../shared/api/events.ts';
import { headerName, type Route } from '../../shared/api/route.ts';
import { allRoutes } from '../../shared/api/route-table.ts';
import { named } from '../../shared/api/shared-schemas.ts';
import { type Code, codes } from '../../shared/errors.ts';
import { shipped } from '../../shared/paths-in-checkout-or-package.ts';
import { version } from '../../shared/version.ts';
import { parserOf } from '../request-checks/authorize-and-perform.ts';

/** Display name and description of each resource, by its name in the route table. */
const tags: Readonly<Record<string, readonly [name: string, description: string]>> = {
  machines: ['Machines', 'The computers that run an agent: list, inspect, rename, tag and remove them.'],
  inventory: ['Inventory', 'Facts about machines, and the packages, ports and containers on them.'],
  tags: ['Tags', 'The names that machines are tagged with.'],
  joinTokens: ['Join tokens', 'The secrets with which new machines join.'],
  files: ['Files', 'Files and directories on machines: read, write, transfer, search and watch them.'],
  commands: ['Commands', 'Programs on machines: run, follow, signal and cancel them, and send them input.'],
  batches: ['Batches', 'One command on many machines.'],
  savedCommands: ['Saved commands', 'Programs with typed parameters, run on machines or by schedules.'],
  upgrades: ['Upgrades', 'Installations of another agent version on many machines, a wave at a time.'],
  schedules: [
    'Schedules',
    'Commands that run by a cron expression or when a path changes, and their past runs.',
  ],
  sessions: [
    'Sessions',
    'Terminals on machines. They stay open without clients, and while a machine is offline for a short time.',
  ],
  events: ['Events', 'The log of what happened: read it, or follow it as it grows.'],
  keys: [
    'API keys',
    'The keys that clients authenticate with, their scopes and the machines that they may use.',
  ],
  logins: ['Logins', 'Logins of browsers: a cookie in place of an API key, with the rights of that key.'],
  live: ['Live updates', 'One stream of changes of machines, commands and batches, and of new events.'],
  webhooks: ['Webhooks', 'Subscriptions that send events to a URL, and their deliveries.'],
  alertRules: ['Alert rules', 'When to open an alert, and about which machines.'],
  alertChannels: ['Alert channels', 'Where alerts are sent: webhooks, chats, phones and e-mail.'],
  maintenanceWindows: ['Maintenance windows', 'Times in which the alerts of some machines are held back.'],
  alerts: ['Alerts', 'Open and past alerts: what is wrong now, and what was wrong.'],
  audit: ['Audit log', 'The append-only record of every call that changes or runs something.'],
  packages: ['Packages', 'The install script, and the agent packages for new machines and for upgrades.'],
  service: ['Service', 'Version, health and metrics of the broker, and this document.'],
};

function codeTable(): string {
  const byStatus = Map.groupBy(Object.entries(codes), ([, status]) => status);
  const rows = [...byStatus].map(
    ([status, found]) => `| ${status} | ${found.map(([code]) => `\`${code}\``).join(', ')} |`,
  );
  return `| status | codes |\n|---|---|\n${rows.join('\n')}`;
}

/** The introduction as Markdown; each heading becomes a section of the reference page. */
function introduction(): string {
  const folder = shipped('docs', () => import.meta.dirname);
  return readFileSync(join(folder, 'reference.md'), 'utf8').replace('{codes}', codeTable());
}

const single = named('Meta', {
  request_id: z.string().describe('Id of the request'),
  timestamp: z.iso.datetime().describe('Time of the answer'),
});
const paged = single
  .extend({
    total: z.int().describe('Number of items in all'),
    limit: z.int().describe('Largest number of items in the answer'),
    offset: z.int().describe('Number of items that were skipped before this page'),
    has_more: z.boolean().describe('Whether more items follow this page'),
  })
  .meta({ id: 'ListMeta' });
const errorBody = named('Error', {
  error: z
    .object({
      code: z.string().describe('Error code'),
      message: z.string().describe('What is wrong, and the next step'),
      details: z
        .record(z.string(), z.unknown())
        .describe('More about the error; its fields depend on the error code'),
    })
    .describe('The error'),
});

const text = { schema: { type: 'string' } } as const;
const number = { schema: { type: 'integer' } } as const;
/** Response headers by name, described as components of the document. */
const headers = {
  'X-Request-Id': { ...text, description: 'Id of the request' },
  'X-RateLimit-Limit': { ...number, description: 'Requests per minute; only if the key has a rate limit' },
  'X-RateLimit-Remaining': { ...number, description: 'Requests left; only if the key has a rate limit' },
  'X-RateLimit-Reset': {
    ...number,
    description: 'Unix time at which the limit resets; only if the key has a rate limit',
  },
  'Retry-After': { ...number, description: 'Seconds to wait before sending the request again' },
  Link: { ...text, description: 'Address of the next page, with `rel="next"`; absent on the last page' },
  ETag: { ...text, description: 'Version of the file, for If-Match and If-None-Match' },
  'Last-Modified': { ...text, description: 'Time of the last change of the file' },
  'Accept-Ranges': { ...text, description: 'Always `bytes`' },
  'Content-Range': { ...text, description: 'The range sent' },
  'Content-Disposition': { ...text, description: 'File name to save as' },
  'X-Output-Offset': { ...number, description: 'Offset of the first byte' },
  'X-Last-Event-Id': {
    ...text,
    description: 'Id with which to resume if the stream breaks before its first event',
  },
} as const;
type Header = keyof typeof headers;

const rateHeaders: readonly Header[] = ['X-RateLimit-Limit', 'X-RateLimit-Remaining', 'X-RateLimit-Reset'];

const headersNamed = (names: readonly Header[]) =>
  Object.fromEntries(names.map((name) => [name, { $ref: `#/components/headers/${name}` }]));

/** The document as JSON text; building it takes 50 ms. `server` is the public address of the API. */
export function openapiText(server: string): string {
  const paths: Record<string, Record<string, ZodOpenApiOperationObject>> = {};
  for (const { noun, operation, route } of allRoutes()) {
    const path = `${route.base}${route.path}`;
    paths[path] = { ...paths[path], [route.method.toLowerCase()]: operationOf(noun, operation, route) };
  }
  const events = [...webhookTypes, 'test'].map((type) => [type, { post: deliveryOf(type) }] as const);
  return JSON.stringify(
    createDocument(
      {
        openapi: '3.1.0',
        info: {
          title: 'Farhand API',
          version,
          description: introduction(),
          contact: { name: 'Operator of this broker', url: server },
          license: { name: 'Apache-2.0', identifier: 'Apache-2.0' },
        },
        servers: [{ url: server, description: 'This broker' }],
        security: [{ apiKey: [] }, { login: [] }],
        tags: Object.values(tags).map(([name, description]) => ({ name, description })),
        paths,
        webhooks: Object.fromEntries(events),
        components: {
          schemas: { Error: errorBody },
          responses: errorResponses(),
          headers,
          securitySchemes: {
            apiKey: {
              type: 'http',
              scheme: 'bearer',
              description: 'An API key, as made with `farhand auth create-key`',
            },
            login: {
              type: 'apiKey',
              in: 'cookie',
              name: '__Host-farhand',
              description:
                'The cookie of a login (`POST /logins`). The broker accepts it only from its own pages. Methods other than GET and HEAD also need the header `X-Farhand-Console: 1`. With an API key in the request, the cookie is ignored.',
            },
          },
        },
      },
      { override: addDefault },
    ),
  );
}

/**
 * Adds the default value of a query parameter. zod-openapi leaves it out if the text of the parameter is converted to a
 * number or boolean.
 */
function addDefault({
  jsonSchema,
  zodSchema,
}: {
  jsonSchema: { default?: unknown };
  zodSchema: z.core.$ZodTypes;
}) {
  if (zodSchema instanceof z.ZodDefault) jsonSchema.default = zodSchema.def.defaultValue;
}

function operationOf(noun: string, operation: string, route: Route): ZodOpenApiOperationObject {
  const requestHeaders = Object.fromEntries(
    Object.entries(route.headers).map(([name, schema]) => [headerName(name), schema]),
  );
  const key = z.string().max(255).optional();
  const failures = failuresOf(route).map(
    ({ status, name }) => [status, { $ref: `#/components/responses/${name}` }] as const,
  );
  return {
    operationId: `${noun}.${operation}`,
    tags: [tags[noun]?.[0] ?? noun],
    summary: route.summary,
    description: [route.description, scopeText(route)].filter(Boolean).join('\n\n'),
    ...(route.access === 'everybody' && { security: [] }),
    requestParams: {
      path: z.object(route.params),
      query: z.object(route.query),
      header: z.object({
        ...requestHeaders,
        ...(route.idempotency && {
          'Idempotency-Key': key.describe(
            'A repeat with the same value within 24 hours gets the answer of the first request',
          ),
        }),
      }),
    },
    ...bodyOf(route),
    responses: { ...successes(route), ...Object.fromEntries(failures) },
  };
}

function scopeText({ access }: Route): string {
  if (access === 'everybody') return 'Needs no key.';
  return access === 'any key' ? 'Needs any valid key.' : `Needs a key with the scope \`${access}\`.`;
}

const binary = { type: 'string', format: 'binary' } as const;

function bodyOf(route: Route): Pick<ZodOpenApiOperationObject, 'requestBody'> {
  if (route.accepts === 'bytes') {
    return { requestBody: { required: true, content: { 'application/octet-stream': { schema: binary } } } };
  }
  if (!route.body) return {};
  if (route.accepts === 'form') {
    const file = z.string().meta({ ...binary, description: 'The file' });
    // The cast is safe: routes that accept forms are built with an object schema.
    const form = (route.body as z.ZodObject).extend({ file });
    return { requestBody: { required: true, content: { 'multipart/form-data': { schema: form } } } };
  }
  const { body: schema, example } = route;
  const required = !schema.safeParse({}).success;
  return {
    requestBody: { required, content: { 'application/json': { schema, ...(example && { example }) } } },
  };
}

function successes(route: Route): ZodOpenApiResponsesObject {
  const { kind, access, replyHeaders = [] } = route;
  const names: Header[] = ['X-Request-Id', ...(access === 'everybody' ? [] : rateHeaders), ...replyHeaders];
  if (kind === 'list') names.push('Link');
  const ranges = 'range' in route.headers;
  if (kind === 'bytes') names.push('Content-Disposition');
  if (ranges) names.push('Last-Modified', 'Accept-Ranges');
  const answer = { ...contentOf(route), headers: headersNamed(names) };
  return {
    [`${route.status}`]: answer,
    ...(ranges && {
      '206': { ...answer, description: 'The range', headers: headersNamed([...names, 'Content-Range']) },
    }),
    ...('if_none_match' in route.headers &&
      route.method === 'GET' && {
        '304': { description: 'Not modified', headers: headersNamed(['X-Request-Id', 'ETag']) },
      }),
  };
}

/** Description and media types of a successful response. */
function contentOf(route: Route) {
  const { kind, reply, listMeta, types = [] } = route;
  if (kind === 'socket') return { description: 'The WebSocket is open' };
  if (kind === 'raw' || kind === 'bytes') {
    const text = { type: 'string' } as const;
    const schemaOf = (type: string) => (kind === 'bytes' ? binary : type === 'application/json' ? {} : text);
    const content = Object.fromEntries(types.map((type) => [type, { schema: schemaOf(type) }]));
    return { description: kind === 'raw' ? 'The text' : 'The bytes', content };
  }
  if (kind === 'lines') {
    return {
      description: 'One JSON object per line',
      content: { 'application/x-ndjson': { schema: reply } },
    };
  }
  if (kind === 'events') {
    const content = { 'text/event-stream': { schema: reply } };
    return { description: 'Server-sent events. The schema describes the data of each event.', content };
  }
  const schema =
    kind === 'list'
      ? z.object({
          data: z.array(reply).describe('The items'),
          meta: (listMeta ? paged.extend(listMeta.shape) : paged).describe('The page'),
        })
      : z.object({
          data: reply.describe('The result'),
          meta:
            kind === 'growing'
              ? paged.describe('The page')
              : single.describe('Id of the request, and time of the answer'),
        });
  return { description: 'Success', content: { 'application/json': { schema } } };
}

/** The error codes of a route by HTTP status, with the name of the component that describes each response. */
function failuresOf(route: Route) {
  const byStatus = Object.groupBy(codesOf(route), (code) => codes[code]);
  return Object.entries(byStatus).map(([status, found]) => ({ status, found, name: found.join('.') }));
}

function errorResponses(): Record<string, ZodOpenApiResponseObject> {
  const responses = allRoutes().flatMap(({ route }) =>
    failuresOf(route).map(({ status, found, name }) => {
      const code = { type: 'string', enum: found } as const;
      const narrowed = {
        type: 'object',
        properties: { error: { type: 'object', properties: { code } } },
      } as const;
      const schema = { allOf: [{ $ref: '#/components/schemas/Error' }, narrowed] };
      const retry: Header[] = ['429', '503'].includes(status) ? ['Retry-After'] : [];
      const response = {
        description: `${STATUS_CODES[status]}: ${found.map((one) => `\`${one}\``).join(', ')}`,
        headers: headersNamed(['X-Request-Id', ...retry]),
        content: { 'application/json': { schema } },
      };
      return [name, response] as const;
    }),
  );
  return Object.fromEntries(responses);
}

/** Every error code that a route may return. */
export function codesOf(route: Route): Code[] {
  const { access, body, accepts, idempotency, impliesMachine, confirmed, errors = [] } = route;
  const missing = parserOf(route).parser.nouns.map((noun) => `${noun}_not_found` as const);
  const found: Code[] = [...errors, 'invalid_request', 'internal_error', ...missing];
  if (access !== 'everybody') found.push('unauthorized', 'forbidden', 'rate_limited', 'unavailable');
  if (confirmed) found.push('confirmation_required');
  if (body) found.push('validation_failed');
  if (body || accepts) found.push('payload_too_large');
  if (idempotency) found.push('conflict', 'idempotency_mismatch');
  if (impliesMachine) found.push('machine_not_found');
  const order = Object.keys(codes);
  return [...new Set(found)].sort((a, b) => order.indexOf(a) - order.indexOf(b));
}

const signature = z.string().optional().describe('`sha256=` and the HMAC-SHA256 of the body, hexadecimal');

/** The request that a webhook of this event type receives. */
function deliveryOf(type: string): ZodOpenApiOperationObject {
  return {
    operationId: `deliver.${type}`,
    tags: ['Webhooks'],
    summary: `Receive ${type}`,
    description:
      'Answer with any 2xx within 15 seconds. After any other answer the delivery is repeated, by default after 1 and 5 minutes.',
    security: [],
    requestParams: {
      header: z.object({
        'X-Service-Event': z.string().describe('Event type'),
        'X-Service-Delivery': z.string().describe('Id of the delivery, the same for each attempt'),
        'X-Service-Signature': signature,
        'webhook-id': z.string().describe('Id of the event (Standard Webhooks)'),
        'webhook-timestamp': z.string().describe('Unix time of the attempt (Standard Webhooks)'),
        'webhook-signature': z
          .string()
          .optional()
          .describe('Signature by the Standard Webhooks specification'),
      }),
    },
    requestBody: { required: true, content: { 'application/json': { schema: deliveryBody(type) } } },
    responses: {
      '2XX': { description: 'Delivered' },
      '4XX': { description: 'Not delivered: repeated' },
    },
  };
}

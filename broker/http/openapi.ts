// OpenAPI 3.1, derived from the table of routes.
import { z } from 'zod';
import { createDocument, type ZodOpenApiOperationObject } from 'zod-openapi';
import { allRoutes } from '../../shared/api/index.ts';
import { errorBody, type Route } from '../../shared/api/route.ts';
import { version } from '../../shared/version.ts';

const single = z.object({ request_id: z.string(), timestamp: z.iso.datetime() }).meta({ id: 'Meta' });
const paged = single
  .extend({ total: z.int(), limit: z.int(), offset: z.int(), has_more: z.boolean() })
  .meta({ id: 'ListMeta' });

/** The document as JSON text, which takes 35 ms to make; `server` is the address people reach the API at. */
export function openapiText(server: string): string {
  const paths: Record<string, Record<string, ZodOpenApiOperationObject>> = {};
  for (const { noun, operation, route } of allRoutes()) {
    const path = `${route.base}${route.path}`;
    paths[path] = { ...paths[path], [route.method.toLowerCase()]: operationOf(noun, operation, route) };
  }
  return JSON.stringify(
    createDocument({
      openapi: '3.1.0',
      info: {
        title: 'Farhand',
        version,
        description:
          'Remote machines over one REST API: live metrics, files and commands on every machine that runs an agent.',
        license: { name: 'Apache-2.0', identifier: 'Apache-2.0' },
      },
      servers: [{ url: server }],
      security: [{ apiKey: [] }],
      tags: [...new Set(allRoutes().map(({ noun }) => noun))].map((name) => ({ name })),
      paths,
      components: {
        securitySchemes: {
          apiKey: {
            type: 'http',
            scheme: 'bearer',
            description: 'A key made with `farhand auth create-key`',
          },
        },
      },
    }),
  );
}

function operationOf(noun: string, operation: string, route: Route): ZodOpenApiOperationObject {
  const headers = Object.fromEntries(
    Object.entries(route.headers).map(([name, schema]) => [headerName(name), schema]),
  );
  const keyed = route.idempotency && {
    'Idempotency-Key': z
      .string()
      .max(255)
      .optional()
      .meta({ description: 'A repeat within 24 h gets the first answer' }),
  };
  return {
    operationId: `${noun}.${operation}`,
    tags: [noun],
    summary: route.summary,
    ...(route.access === 'everybody' ? { security: [] } : { description: `Needs ${scopeText(route)}.` }),
    ...(route.description && { description: route.description }),
    requestParams: {
      path: z.object(route.params),
      query: z.object(route.query),
      header: z.object({ ...headers, ...keyed }),
    },
    ...bodyOf(route),
    responses: {
      [`${route.status}`]: success(route),
      ...(route.kind === 'bytes' && {
        '206': { ...success(route), description: 'The range that was asked for' },
        '304': { description: 'Unchanged' },
      }),
      '4XX': { description: 'Refused', content: { 'application/json': { schema: errorBody } } },
      ...(route.access !== 'everybody' && {
        '5XX': { description: 'Failed', content: { 'application/json': { schema: errorBody } } },
      }),
    },
  };
}

const ofFile = {
  ETag: { schema: { type: 'string' } },
  'Last-Modified': { schema: { type: 'string' } },
  'Accept-Ranges': { schema: { type: 'string' } },
  'Content-Range': { schema: { type: 'string' }, description: 'Of a range' },
} as const;
const binary = { type: 'string', format: 'binary' } as const;

function bodyOf(route: Route): Pick<ZodOpenApiOperationObject, 'requestBody'> {
  if (route.accepts === 'bytes') {
    return { requestBody: { required: true, content: { 'application/octet-stream': { schema: binary } } } };
  }
  if (!route.body) return {};
  if (route.accepts === 'form') {
    // The builder of such routes takes fields as an object.
    const form = (route.body as z.ZodObject).extend({ file: z.string().meta(binary) });
    return { requestBody: { required: true, content: { 'multipart/form-data': { schema: form } } } };
  }
  return {
    requestBody: {
      required: !route.body.safeParse({}).success,
      content: { 'application/json': { schema: route.body } },
    },
  };
}

function scopeText({ access }: Route): string {
  return access === 'any key' ? 'any valid key' : `a key with the scope \`${access}\``;
}

const streams: Partial<Record<Route['kind'], { description: string; type: string }>> = {
  lines: { description: 'One object a line', type: 'application/x-ndjson' },
  events: { description: 'Events, their data as JSON', type: 'text/event-stream' },
};

function success(route: Route) {
  if (route.kind === 'raw') return { description: 'As asked' };
  if (route.kind === 'socket') return { description: 'The WebSocket is open' };
  if (route.kind === 'bytes') {
    return {
      description: 'The file',
      headers: ofFile,
      content: { 'application/octet-stream': { schema: binary } },
    };
  }
  const stream = streams[route.kind];
  if (stream) return { description: stream.description, content: { [stream.type]: { schema: route.reply } } };
  const schema =
    route.kind === 'list'
      ? z.object({ data: z.array(route.reply), meta: paged })
      : z.object({ data: route.reply, meta: route.kind === 'growing' ? paged : single });
  return { description: 'Success', content: { 'application/json': { schema } } };
}

/** `if_match` as If-Match. */
function headerName(name: string): string {
  return name
    .split('_')
    .map((word) => word.charAt(0).toUpperCase() + word.slice(1))
    .join('-');
}

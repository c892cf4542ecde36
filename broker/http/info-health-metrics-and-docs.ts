// The routes about the broker itself: version, health, metrics, the OpenAPI document, and the reference page
// (Redoc).
import { hash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { collectDefaultMetrics, Gauge, Histogram, Registry } from 'prom-client';
import type { Handlers, RawReply } from '../../shared/api/route-table.ts';
import { AppError } from '../../shared/errors.ts';
import { shipped } from '../../shared/paths-in-checkout-or-package.ts';
import { version } from '../../shared/version.ts';
import type { Authority } from '../ca-and-broker-certificates.ts';
import { contentBytes } from '../files/file-handlers.ts';
import { databaseUnavailable } from '../history/group-commit.ts';
import { newNonce, pagePolicy } from './content-security-policy.ts';
import { openapiText } from './openapi.ts';

/** The status of a running broker, as its log and commands print it. */
export interface Status {
  ready: boolean;
  /** URL of the REST API. */
  url: string;
  /** HOST:PORT to which agents connect. */
  grpc: string;
  /** HOST:PORT to which agents connect from outside. Empty if it is the same as `grpc`. */
  publicGrpc: string;
  /**
   * The pin by which clients recognize the certificate of the REST API: `sha256//BASE64` of the certificate's public
   * key. Empty if the broker's own CA has not issued the certificate.
   */
  pin: string;
}

const renderer = 'redoc.standalone.js';

const pageWith = (nonce: string): string => `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta property="csp-nonce" nonce="${nonce}">
<title>Farhand API</title>
<style nonce="${nonce}">body { margin: 0 }</style>
</head>
<body>
<div id="page"></div>
<script type="module" src="docs/page.js"></script>
</body>
</html>
`;
// Redoc turns strings into HTML. The page's content security policy allows that only through a Trusted Types policy,
// which this script creates. It may return each string unchanged, because all of them come from the broker's own
// OpenAPI document.
const script = `import { init } from './${renderer}';
globalThis.trustedTypes?.createPolicy('default', { createHTML: (text) => text });
init('api/v1/openapi.json', { disableTelemetry: true }, document.getElementById('page'));
`;

const replies = new Map<string, RawReply>();

/** Returns an answer that is the same for all requests. The first request creates it, with its ETag. */
function createOnce(name: string, type: string, make: () => string | Buffer): RawReply {
  const found = replies.get(name);
  if (found) return found;
  const body = Buffer.from(make());
  const reply = { type, body, etag: `"${hash('sha256', body, 'base64url')}"` };
  replies.set(name, reply);
  return reply;
}

/** `isAway` returns true while the broker answers requests with 503, because its PostgreSQL database is unreachable. */
export function serviceHandlers(
  status: Status,
  { fingerprint, certificate }: Authority,
  publicUrl: () => string,
  metrics: RequestMetrics,
  isAway: () => boolean,
): Omit<Handlers['service'], 'metricsTargets' | 'machineMetrics'> {
  return {
    info: () => ({
      version,
      grpc_address: status.publicGrpc || status.grpc,
      ca_fingerprint: fingerprint,
      tls_pin: status.pin || null,
      limits: { body_bytes: 1024 * 1024, file_content_bytes: contentBytes, page: 100 },
    }),
    ca: () => ({ type: 'application/x-pem-file', body: certificate }),
    openapi() {
      const url = publicUrl();
      return createOnce(url, 'application/json', () => openapiText(url));
    },
    healthz: () => ({ type: 'text/plain', body: 'ok\n' }),
    readyz() {
      if (!status.ready) throw new AppError('unavailable', 'the broker is starting or stopping: try again');
      if (isAway()) throw databaseUnavailable();
      return { type: 'text/plain', body: 'ready\n' };
    },
    prometheus(_input, caller) {
      if (!caller.reachable()) return metrics.text();
      throw new AppError(
        'forbidden',
        'metrics cover all machines, but this key is limited to some machines: use a key for all machines',
      );
    },
    docs(_input, caller) {
      const nonce = newNonce();
      // The policy allows fonts in data: URLs, because Redoc's stylesheet contains its icons as such a font.
      caller.headers.set('Content-Security-Policy', pagePolicy(nonce, "'self' data:"));
      return { type: 'text/html', body: pageWith(nonce) };
    },
    docsFile({ file }) {
      if (file === 'page.js') return createOnce(file, 'text/javascript', () => script);
      if (file === renderer) {
        return createOnce(file, 'text/javascript', () => readFileSync(join(rendererDirectory(), file)));
      }
      throw new AppError('route_not_found', `the reference page has no file ${file}: open /docs`, { file });
    },
  };
}

/** Directory of the Redoc script, which comes with the linter of the OpenAPI document (@redocly/cli). */
function rendererDirectory(): string {
  return shipped('docs', () =>
    join(dirname(createRequire(import.meta.url).resolve('@redocly/cli/package.json')), 'lib/chunks'),
  );
}

export type RequestMetrics = ReturnType<typeof createMetrics>;

/**
 * Creates the metrics of one broker, in a registry of its own. `machines` counts the online and the
 * registered machines.
 */
export function createMetrics(machines: () => { online: number; registered: number }) {
  const registry = new Registry();
  collectDefaultMetrics({ register: registry });
  const requests = new Histogram({
    name: 'farhand_http_request_seconds',
    help: 'Duration of REST requests',
    labelNames: ['method', 'route', 'status'],
    buckets: [0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60],
    registers: [registry],
  });
  new Gauge({
    name: 'farhand_machines',
    help: 'Machines by state',
    labelNames: ['state'],
    registers: [registry],
    collect() {
      const { online, registered } = machines();
      this.set({ state: 'online' }, online);
      this.set({ state: 'offline' }, registered - online);
    },
  });
  return {
    observe: (method: string, route: string, status: number, ms: number): void =>
      requests.observe({ method, route, status }, ms / 1000),
    /** The metrics in Prometheus text format, with their content type. */
    text: async () => ({ type: registry.contentType, body: await registry.metrics() }),
  };
}

// The routes about the broker itself: health, metrics, OpenAPI and the reference page, all from our own files.
import { hash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import type { Handlers, RawReply } from '../../shared/api/index.ts';
import { AppError } from '../../shared/errors.ts';
import { shipped } from '../../shared/home.ts';
import { version } from '../../shared/version.ts';
import { contentBytes } from '../files/index.ts';
import type { RequestMetrics } from './metrics.ts';
import { openapiText } from './openapi.ts';

export interface ServiceOptions {
  publicUrl(): string;
  grpcAddress(): string;
  fingerprint: string;
  /** PEM. */
  ca: string;
  /** `sha256//BASE64` of the REST certificate's key, or empty. */
  pin(): string;
  ready(): boolean;
  metrics: RequestMetrics;
}

/** The reference page loads its own parts and the document, nothing from outside and no inline script. */
const pagePolicy =
  "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/** The parts of the page: our own script, and one library's two files. */
const library: Readonly<Record<string, string>> = {
  'swagger-ui-bundle.js': 'text/javascript',
  'swagger-ui.css': 'text/css',
};

const page = `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Farhand API</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="page"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/page.js"></script>
</body>
</html>
`;
const script = `SwaggerUIBundle({ url: 'api/v1/openapi.json', dom_id: '#page', deepLinking: true, validatorUrl: null });\n`;

const made = new Map<string, RawReply>();

/** Large, and the same for all: each is made once, with its ETag. */
function once(name: string, type: string, make: () => string | Buffer): RawReply {
  const known = made.get(name);
  if (known) return known;
  const body = Buffer.from(make());
  const reply = { type, body, etag: `"${hash('sha256', body, 'base64url')}"` };
  made.set(name, reply);
  return reply;
}

export function serviceHandlers(options: ServiceOptions): Handlers['service'] {
  return {
    info: () => ({
      version,
      grpc_address: options.grpcAddress(),
      ca_fingerprint: options.fingerprint,
      tls_pin: options.pin() || null,
      limits: { body_bytes: 1024 * 1024, file_content_bytes: contentBytes, page: 100 },
    }),
    ca: () => ({ type: 'application/x-pem-file', body: options.ca }),
    openapi() {
      const url = options.publicUrl();
      return once(url, 'application/json', () => openapiText(url));
    },
    healthz: () => ({ type: 'text/plain', body: 'ok\n' }),
    readyz() {
      if (!options.ready()) throw new AppError('unavailable', 'the broker is starting or stopping');
      return { type: 'text/plain', body: 'ready\n' };
    },
    prometheus(_input, caller) {
      if (!caller.reachable()) return options.metrics.text();
      throw new AppError('forbidden', 'figures of all machines are for keys that reach them all');
    },
    docs(_input, caller) {
      caller.headers.set('Content-Security-Policy', pagePolicy);
      return { type: 'text/html', body: page };
    },
    docsFile({ file }) {
      if (file === 'page.js') return once(file, 'text/javascript', () => script);
      const type = Object.hasOwn(library, file) ? library[file] : undefined;
      if (!type) throw new AppError('route_not_found', 'the reference page has no such part', { file });
      return once(file, type, () => readFileSync(join(libraryDirectory(), file)));
    },
  };
}

function libraryDirectory(): string {
  return shipped('docs', () =>
    dirname(createRequire(import.meta.url).resolve('swagger-ui-dist/package.json')),
  );
}

// The broker itself over REST: what it is, how it feels, how to speak to it.
import * as z from 'zod';
import { raw, single } from './route.ts';

export const service = {
  info: single('GET', '/info', 'any key', {
    summary: 'Version, addresses and limits of this broker',
    reply: z
      .object({
        version: z.string(),
        grpc_address: z.string(),
        ca_fingerprint: z.string().describe('SHA-256 of the link’s own CA, hexadecimal'),
        tls_pin: z
          .string()
          .nullable()
          .describe('For curl --pinnedpubkey: the key of the REST certificate, where it is our own'),
        limits: z.object({ body_bytes: z.number(), file_content_bytes: z.number(), page: z.number() }),
      })
      .meta({ id: 'Info' }),
  }),
  ca: raw(
    '/ca.pem',
    'any key',
    'The broker’s own certificate authority in PEM, which clients of its gRPC port trust',
    '/api/v1',
  ),
  openapi: raw('/openapi.json', 'everybody', 'This document', '/api/v1'),
  healthz: raw('/healthz', 'everybody', 'Whether the process answers'),
  readyz: raw('/readyz', 'everybody', 'Whether the broker can take work'),
  prometheus: raw('/metrics', 'machines:read', 'Metrics for Prometheus'),
  docs: raw('/docs', 'everybody', 'Reference page'),
  docsFile: raw('/docs/{file}', 'everybody', 'Parts of the reference page'),
};

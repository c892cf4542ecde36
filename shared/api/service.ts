// The broker itself over REST: what it is, how it feels, how to speak to it.
import * as z from 'zod';
import { raw, single } from './route.ts';

export const service = {
  info: single({
    method: 'GET',
    path: '/info',
    access: 'any key',
    summary: 'Version, addresses and limits of this broker',
    reply: z
      .object({
        version: z.string(),
        grpc_address: z.string(),
        ca_fingerprint: z.string().meta({ description: 'SHA-256 of the link’s own CA, hexadecimal' }),
        tls_pin: z.string().nullable().meta({
          description: 'For curl --pinnedpubkey: the key of the REST certificate, where it is our own',
        }),
        limits: z.object({ body_bytes: z.number(), file_content_bytes: z.number(), page: z.number() }),
      })
      .meta({ id: 'Info' }),
  }),
  ca: raw({
    path: '/ca.pem',
    base: '/api/v1',
    access: 'any key',
    summary: 'The broker’s own certificate authority in PEM, which clients of its gRPC port trust',
  }),
  openapi: raw({ path: '/openapi.json', base: '/api/v1', access: 'everybody', summary: 'This document' }),
  healthz: raw({ path: '/healthz', base: '', access: 'everybody', summary: 'Whether the process answers' }),
  readyz: raw({
    path: '/readyz',
    base: '',
    access: 'everybody',
    summary: 'Whether the broker can take work',
  }),
  prometheus: raw({ path: '/metrics', base: '', access: 'machines:read', summary: 'Metrics for Prometheus' }),
  docs: raw({ path: '/docs', base: '', access: 'everybody', summary: 'Reference page' }),
  docsFile: raw({
    path: '/docs/{file}',
    base: '',
    access: 'everybody',
    summary: 'Parts of the reference page',
    params: { file: z.string() },
  }),
};

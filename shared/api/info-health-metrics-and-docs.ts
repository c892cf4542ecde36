// REST routes about the broker itself: version, health, metrics, certificates and the reference page.
import * as z from 'zod';
import { raw, single } from './define-route.ts';
import { allOfTags, group, named, queryNumber } from './shared-schemas.ts';

const fingerprint =
  'SHA-256 fingerprint, in hexadecimal, of the CA certificate that signs the gRPC certificate';

export const service = {
  info: single('GET', '/info', 'any key', {
    summary: 'Get version, addresses and limits of the broker',
    reply: named('Info', {
      version: z.string().describe('Version of the broker'),
      grpc_address: z.string().describe('Address of the broker’s gRPC port, as HOST:PORT'),
      ca_fingerprint: z.string().describe(fingerprint),
      tls_pin: z
        .string()
        .nullable()
        .describe(
          'Hash of the public key of the REST API’s certificate, for `curl --pinnedpubkey`; null without TLS, and if a CA other than the broker’s own issued that certificate',
        ),
      limits: group('Limits', {
        body_bytes: z.number().describe('Largest JSON body in bytes'),
        file_content_bytes: z.number().describe('Largest file in bytes that `files/content` reads'),
        page: z.number().describe('Largest `limit` of a list'),
      }),
    }),
  }),
  ca: raw('/ca.pem', 'any key', {
    summary: 'Download the certificate of the CA that signs the gRPC certificate, as PEM',
    types: ['application/x-pem-file'],
    base: '/api/v1',
  }),
  openapi: raw('/openapi.json', 'everybody', {
    summary: 'Get this document',
    types: ['application/json'],
    base: '/api/v1',
  }),
  healthz: raw('/healthz', 'everybody', {
    summary: 'Check whether the broker’s process runs (liveness)',
    description: 'Answers 200, even if the broker cannot accept other requests.',
    types: ['text/plain'],
  }),
  readyz: raw('/readyz', 'everybody', {
    summary: 'Check whether the broker accepts requests (readiness)',
    description: 'Answers 200; 503 while the broker starts or stops, or cannot reach its database.',
    types: ['text/plain'],
    errors: ['unavailable'],
  }),
  prometheus: raw('/metrics', 'machines:read', {
    summary: 'Get metrics for Prometheus',
    description: 'Needs an API key that may use every machine.',
    types: ['text/plain'],
  }),
  metricsTargets: raw('/metrics/targets', 'machines:read', {
    summary: 'List the machines for Prometheus to scrape (http_sd)',
    description:
      'Without `port`, Prometheus scrapes this broker once for each machine. With `port`, Prometheus scrapes an exporter on each machine. A key that is limited to some machines gets only those machines.',
    types: ['application/json'],
    query: {
      tags: allOfTags,
      port: queryNumber(1, 65_535)
        .optional()
        .describe(
          'Port of an exporter that runs on every machine, such as 9100: the target of a machine is then HOSTNAME:PORT. Default: every target is the address of this broker, which serves the last report of each machine',
        ),
    },
  }),
  machineMetrics: raw('/metrics/machines/{machine_id}', 'machines:read', {
    summary: 'Get the latest metrics of a machine in the Prometheus format',
    description:
      'For a machine that is offline, or whose owner allows no metrics, the answer has only `farhand_machine_up`.',
    types: ['text/plain'],
  }),
  docs: raw('/docs', 'everybody', { summary: 'Show the page of the API reference', types: ['text/html'] }),
  docsFile: raw('/docs/{file}', 'everybody', {
    summary: 'Get a script of the API reference page',
    types: ['text/javascript'],
    errors: ['route_not_found'],
  }),
};

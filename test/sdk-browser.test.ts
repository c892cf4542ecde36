// The SDK in a browser: one bundle that needs nothing from Node, with the size that docs/sdk.md names.
import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { createContext, runInContext } from 'node:vm';
import { gzipSync } from 'node:zlib';
import { build } from 'esbuild';
import { expect, test } from 'vitest';
import type * as Sdk from '../shared/sdk/index.ts';
import { startFarhand, temporaryFolder } from './start-farhand.ts';

const root = join(import.meta.dirname, '..');

/** Bundles the SDK of the package for a page. */
async function bundle(): Promise<string> {
  const folder = temporaryFolder('sdk');
  execFileSync(process.execPath, [join(root, 'scripts/bundle-programs.ts'), folder, 'sdk']);
  const { outputFiles } = await build({
    entryPoints: [join(folder, 'lib/sdk.js')],
    bundle: true,
    minify: true,
    write: false,
    platform: 'browser',
    target: 'es2022',
    format: 'iife',
    globalName: 'sdk',
    logLevel: 'silent',
  });
  return outputFiles[0]?.text ?? '';
}

test('the bundle for a browser has no import of Node, works without Node, and is as small as docs/sdk.md says', async () => {
  const system = await startFarhand();
  const code = await bundle();
  // The bundle gets only globals that a browser has.
  const { fetch, Headers, Response, Blob, FormData, URL, URLSearchParams, AbortController, WebSocket } =
    globalThis;
  const {
    TextDecoder,
    TextEncoder,
    TransformStream,
    ReadableStream,
    crypto,
    atob,
    setTimeout,
    clearTimeout,
    performance,
  } = globalThis;
  const page = createContext({
    ...{ fetch, Headers, Response, Blob, FormData, URL, URLSearchParams, AbortController, WebSocket },
    ...{ TextDecoder, TextEncoder, TransformStream, ReadableStream, crypto, atob, clearTimeout, performance },
    // In a browser setTimeout returns a number.
    setTimeout: (run: () => void, ms: number) => Number(setTimeout(run, ms)),
  });
  runInContext(code, page);
  const { Farhand } = runInContext('sdk', page) as typeof Sdk;
  const client = new Farhand({ baseUrl: system.url, apiKey: system.key });
  const made = await client.keys.create({ name: 'made here', scopes: ['files:read'] });
  const names: string[] = [];
  for await (const { name } of client.keys.list({ limit: 1, sort: 'name' })) names.push(name);
  expect([names, made.name]).toEqual([['made here', 'test'], 'made here']);
  await system.agent({ name: 'seen' });
  for await (const { data } of client.events.stream({
    last_event_id: (await client.events.list()).items.at(-1)?.id,
  })) {
    expect(data.type).toMatch(/^machine/);
    break;
  }
  expect(code).not.toContain('zod');
  const received = /(\d+) KB \(gzip\)/.exec(readFileSync(join(root, 'docs/sdk.md'), 'utf8'))?.[1];
  expect(Math.abs(gzipSync(code).length / 1000 - Number(received))).toBeLessThan(1);
});

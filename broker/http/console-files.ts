// Serves the console's files, which scripts/build-console.ts builds: one page for every path, and assets with hashed
// names.
import { existsSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { extname, join } from 'node:path';
import type { Context, Next } from 'koa';
import { AppError, isErrno } from '../../shared/errors.ts';
import { home, shipped } from '../../shared/paths-in-checkout-or-package.ts';
import { newNonce, pagePolicy } from './content-security-policy.ts';
import { sendRaw } from './reply.ts';

export const consoleDirectory = shipped('console', () => join(home, 'generated/console'));

const types: Readonly<Record<string, string>> = {
  '.js': 'text/javascript',
  '.css': 'text/css',
  '.svg': 'image/svg+xml',
  '.woff2': 'font/woff2',
};
const assetPath = /^\/console\/assets\/([\w.-]{1,100}-[A-Za-z0-9]{6,16}\.(?:js|css|svg|woff2))$/;
const immutable = 'public, max-age=31536000, immutable';
/** Suffixes of the compressed copies of an asset, by content coding. */
const endings: Readonly<Record<string, string>> = { br: '.br', gzip: '.gz', identity: '' };

/**
 * Answers a browser's request for `/`, and requests for paths below `/console`. Passes all other requests on.
 */
export function serveConsole(directory: string) {
  const find = sharedAssets(directory);
  return async (ctx: Context, next: Next): Promise<void> => {
    const { method, path } = ctx;
    if (method !== 'GET' && method !== 'HEAD') return void (await next());
    if (path === '/' && /\btext\/html\b/i.test(ctx.get('accept')))
      return ctx.redirect(existsSync(join(directory, 'index.html')) ? '/console/' : '/docs');
    if (path !== '/console' && !path.startsWith('/console/')) return void (await next());
    if (path.startsWith('/console/assets/')) await sendAsset(ctx, find);
    else await sendPage(ctx, directory);
  };
}

async function sendPage(ctx: Context, directory: string): Promise<void> {
  const page = await read(directory, 'index.html');
  if (!page) {
    const how = 'the console is not built: run npx node scripts/build-console.ts in the checkout, and reload';
    throw new AppError('unavailable', how);
  }
  const nonce = newNonce();
  ctx.set({
    'Content-Security-Policy': pagePolicy(nonce),
    'Cross-Origin-Opener-Policy': 'same-origin',
  });
  ctx.type = 'text/html';
  ctx.body = page.toString().replaceAll('__NONCE__', nonce);
}

async function sendAsset(ctx: Context, find: Find): Promise<void> {
  const name = assetPath.exec(ctx.path)?.[1];
  const coding = ctx.acceptsEncodings('br', 'gzip', 'identity') || 'identity';
  const compressed = name && coding !== 'identity' && (await find(`${name}${endings[coding]}`));
  const body = compressed || (name && (await find(name)));
  if (!name || !body)
    throw new AppError('route_not_found', 'the console has no such file: reload its page', {
      path: ctx.path,
    });
  if (compressed) ctx.set('Content-Encoding', coding);
  ctx.set({ 'Cache-Control': immutable, Vary: 'Accept-Encoding' });
  sendRaw(ctx, { type: types[extname(name)] ?? 'application/octet-stream', body });
}

type Find = (name: string) => Promise<Buffer | undefined>;

/**
 * Reads each asset into memory once and shares it among all answers. Otherwise clients without a key could fill the
 * memory.
 */
function sharedAssets(directory: string): Find {
  const assets = new Map<string, Promise<Buffer | undefined>>();
  return async (name) => {
    // An asset never changes, because its name contains a hash of the content.
    const reading = assets.get(name) ?? read(directory, `assets/${name}`);
    assets.set(name, reading);
    try {
      const content = await reading;
      if (!content) assets.delete(name);
      return content;
    } catch (error) {
      assets.delete(name);
      throw error;
    }
  };
}

/**
 * Reads a file of the console. Returns undefined if the console is not built, or if a newer build lacks this file.
 */
function read(directory: string, name: string): Promise<Buffer | undefined> {
  return readFile(join(directory, name)).catch((error: unknown) => {
    if (isErrno(error, 'ENOENT', 'ENOTDIR')) return undefined;
    throw error;
  });
}

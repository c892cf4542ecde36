// Searches everything that a broker stores, logs and answers for secrets that it has returned to clients. This is done
// for every broker and agent of a test when the test ends.
import { createPrivateKey } from 'node:crypto';
import { existsSync, readdirSync, readFileSync, statSync } from 'node:fs';
import { basename, join, relative } from 'node:path';
import { pino } from 'pino';
import type { Logger } from '../shared/logger.ts';

/**
 * Descriptions of the secrets, such as `an API key`. The keys of this map are the secrets as Latin1 text, which is
 * searched twice as fast as a Buffer.
 */
const secrets = new Map<string, string>();
/** Answers that contained a secret although their request did not create it. */
let blabbed: string[] = [];
/** Number of brokers and agents that the current test runs. */
let open = 0;

/** Files in which the programs store their own secrets. These secrets may occur only in these files. */
const ownFiles = ['identity.json', 'authority.json', 'webhooks.key', 'rest-key.json'];
/** Files of more bytes than this are not searched. They are output of commands; other files of tests are small. */
const largestFile = 16 * 1024 * 1024;
/** Shorter secrets are not searched for, because the same text may occur by chance. */
const shortest = 16;

export function remember(what: string, secret: string | Buffer): void {
  const bytes = Buffer.isBuffer(secret) ? secret : Buffer.from(secret);
  if (bytes.length >= shortest) secrets.set(bytes.toString('latin1'), what);
}

/** Allows a secret to occur anywhere, for a test that publishes it on purpose, for example in a command line. */
export function giveAway(secret: string): void {
  const text = Buffer.from(secret).toString('latin1');
  for (const key of secrets.keys()) if (text.includes(key)) secrets.delete(key);
}

const forms: [what: string, form: RegExp][] = [
  ['an API key', /service_apikey_([0-9A-Za-z]{43})/g],
  ['a join token', /farhand_join_([0-9A-Za-z]{43})/g],
  ['a ticket', /[?&]ticket=([0-9A-Za-z]{43})/g],
];

/**
 * Remembers the secrets in a request and its answer. If the answer is to a GET or is an error, it must not contain a
 * secret that was remembered earlier: such secrets are recorded.
 */
export function overhear(
  method: string,
  { asked, status, received }: { asked: unknown; status: number; received: string },
): void {
  if (method === 'GET' || status >= 400)
    blabbed.push(...found(Buffer.from(received), `an answer to ${method}`));
  for (const [what, form] of forms)
    for (const [, secret = ''] of received.matchAll(form)) remember(what, secret);
  // A file's bytes hold no secret of a webhook, and JSON.stringify() takes a second for 8 MiB of them.
  if (ArrayBuffer.isView(asked)) return;
  const body = typeof asked === 'string' ? asked : JSON.stringify(asked ?? '');
  for (const [, secret = ''] of body.matchAll(/"secret":"([^"\\]+)"/g))
    remember('a webhook’s secret', secret);
}

/** A fetch that searches short JSON answers for secrets. */
export const listening: typeof fetch = async (url, init) => {
  const response = await fetch(url, init);
  const { headers, status } = response;
  const length = Number(headers.get('content-length') ?? Number.POSITIVE_INFINITY);
  if (!headers.get('content-type')?.includes('application/json') || length > 64 * 1024) return response;
  const received = await response.clone().text();
  overhear(init?.method ?? 'GET', { asked: init?.body, status, received });
  return response;
};

interface Silence {
  log: Logger;
  lines: readonly string[];
}

/**
 * Prepares to search the directory and the log of a broker for secrets. Call `meanwhile` while the broker runs, and
 * `afterwards` when it is closed. Both throw if they find a secret.
 */
export function keepBrokerSilent(directory: string) {
  const { log, lines } = begin('broker');
  const search = (): void => {
    rememberKey('the authority’s key', join(directory, 'authority.json'));
    const vault = join(directory, 'webhooks.key');
    if (existsSync(vault)) {
      const text = readFileSync(vault, 'utf8').trim();
      remember('the key of the vault', text);
      remember('the key of the vault', Buffer.from(text, 'hex'));
    }
    expectNothing([...inDirectory(directory), ...found(Buffer.from(lines.join('')), 'the broker’s log')]);
  };
  return { log, lines, meanwhile: search, afterwards: () => finish(search) };
}

/**
 * Prepares to search the directory and the log of an agent for secrets. Call `begin` when the agent has its identity,
 * and `afterwards` when it is closed.
 */
export function keepAgentSilent(directory: string) {
  const { log, lines } = begin('agent');
  const search = (): void => {
    expectNothing([...inDirectory(directory), ...found(Buffer.from(lines.join('')), 'the agent’s log')]);
  };
  return {
    log,
    lines,
    begin: () => rememberKey('a machine’s key', join(directory, 'identity.json')),
    afterwards: () => finish(search),
  };
}

function begin(name: string): Silence {
  open += 1;
  const lines: string[] = [];
  const write = (line: string): void => {
    lines.push(line);
    if (process.env.TEST_LOG === 'debug') process.stderr.write(line);
  };
  return { log: pino({ name, level: 'debug' }, { write }), lines };
}

function finish(search: () => void): void {
  try {
    search();
  } finally {
    open -= 1;
    if (open === 0) {
      secrets.clear();
      blabbed = [];
    }
  }
}

function expectNothing(leaks: string[]): void {
  const all = [...new Set([...leaks, ...blabbed])];
  blabbed = [];
  if (all.length > 0) throw new Error(`a secret was leaked: ${all.join('; ')}`);
}

function found(bytes: Buffer, where: string): string[] {
  const text = bytes.toString('latin1');
  return [...secrets].filter(([secret]) => text.includes(secret)).map(([, what]) => `${what} in ${where}`);
}

/** Searches the names and contents of all files below a directory. */
function inDirectory(directory: string): string[] {
  if (!existsSync(directory)) return [];
  return readdirSync(directory, { recursive: true, withFileTypes: true }).flatMap((entry) => {
    const path = join(entry.parentPath, entry.name);
    const name = relative(directory, path);
    const named = found(Buffer.from(entry.name), `the name ${name}`);
    const read = entry.isFile() && !ownFiles.includes(basename(name));
    return read ? [...named, ...found(contentOf(path), name)] : named;
  });
}

/** Returns the content of a file; empty if the file was removed meanwhile. */
function contentOf(path: string): Buffer {
  try {
    return statSync(path).size > largestFile ? Buffer.alloc(0) : readFileSync(path);
  } catch {
    return Buffer.alloc(0);
  }
}

/** Remembers a private key both as bytes and as the text in its file. */
function rememberKey(what: string, file: string): void {
  const [, pem] = /"private_key":"([^"]+)"/.exec(existsSync(file) ? readFileSync(file, 'utf8') : '') ?? [];
  if (!pem) return;
  const private_key = pem.replaceAll('\\n', '\n');
  const { d = '' } = createPrivateKey(private_key).export({ format: 'jwk' }) as { d?: string };
  remember(what, Buffer.from(d, 'base64url'));
  remember(what, private_key.split('\n')[1] ?? '');
}

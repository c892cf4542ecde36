// Finds the broker to use, and connects to it by URL and key or by the socket file in its data directory.
import { existsSync, readFileSync, rmSync, statSync } from 'node:fs';
import { mkdir } from 'node:fs/promises';
import { homedir } from 'node:os';
import { dirname, join } from 'node:path';
import { now } from '../../shared/clock.ts';
import { writeDurably } from '../../shared/durable-file.ts';
import { errnoOf, StartError } from '../../shared/errors.ts';
import { reasonOf as causeOf } from '../../shared/sdk/errors-and-envelopes.ts';
import { Farhand, FarhandError, type FarhandOptions } from '../../shared/sdk/index.ts';
import { atPath, reasonOf } from '../../shared/system-error-messages.ts';
import type { Trust } from './pinned-transport.ts';
import { hint } from './print.ts';

export interface Where extends Trust {
  /** Data directory of a broker on this machine. */
  dataDir: string | undefined;
  url: string | undefined;
  apiKey: string | undefined;
  /** True if a new or empty directory may become a broker's data directory. */
  mayCreate?: boolean | undefined;
  /** True if the broker may send no byte for minutes, for example during a copy. */
  isSlow?: boolean | undefined;
}

/**
 * Returns the broker to use. The first of these sources that is set decides: --data-dir, FARHAND_URL, FARHAND_DATA_DIR,
 * the stored `farhand login`.
 */
export function where(options: { dataDir?: string }): Where {
  const { FARHAND_DATA_DIR, FARHAND_URL, FARHAND_API_KEY } = process.env;
  const dataDir = options.dataDir ?? (FARHAND_URL ? undefined : FARHAND_DATA_DIR);
  // An empty variable usually means that a script failed to get its key. The stored login is not used instead, because
  // it could have more rights.
  if (FARHAND_API_KEY === '' && !dataDir)
    throw new StartError('FARHAND_API_KEY is empty: set it to a key, or unset it to use farhand login');
  const login = dataDir ? undefined : readLogin();
  const url = brokerUrl(FARHAND_URL || login?.url);
  // A key stored for one broker is never sent to another broker.
  const same = brokerUrl(login?.url) === url ? login : undefined;
  return { dataDir, url, apiKey: FARHAND_API_KEY ?? same?.api_key, ...trustOf({}, same) };
}

/** Returns the trust settings. Each comes from its flag, else from the environment, else from the stored login. */
export function trustOf(flags: Trust, login: Trust = {}): Trust {
  const { FARHAND_PIN, FARHAND_CA, FARHAND_INSECURE } = process.env;
  return {
    pin: flags.pin ?? (FARHAND_PIN || login.pin),
    ca: flags.ca ?? (FARHAND_CA || login.ca),
    insecure: flags.insecure ?? (FARHAND_INSECURE === '1' || login.insecure),
  };
}

/**
 * Removes the query, slashes at the end and /api/v1 from a URL. Returns the text unchanged if it is not a URL, or if it
 * contains a user name or password.
 */
export function brokerUrl<T extends string | undefined>(text: T): T | string {
  const url = text === undefined ? null : URL.parse(text.trim());
  if (!url || url.username || url.password) return text;
  return `${url.origin}${url.pathname}`.replace(/\/+$/, '').replace(/\/api\/v1$/, '');
}

/**
 * Calls `use` with a client. Afterwards closes the connection, and stops the broker if it was started only
 * for this call.
 */
export async function withBroker<T>(place: Where, use: (client: Farhand) => Promise<T>): Promise<T> {
  const { dataDir, url, apiKey, mayCreate } = place;
  if (dataDir)
    return (await import('./call-or-start-local-broker.ts')).withSocket(dataDir, use, { mayCreate });
  if (url && apiKey) return withUrl({ ...place, url }, use);
  if (url)
    throw new StartError(
      `there is no API key for ${url}: set FARHAND_API_KEY, run farhand login ${url}, or pass --data-dir DIR on the broker’s machine`,
    );
  throw new StartError(
    'no broker is configured: run farhand login URL, set FARHAND_URL and FARHAND_API_KEY, or pass --data-dir DIR on the broker’s machine',
  );
}

/**
 * Like withBroker(), but only over HTTP. The key may be missing. If the broker's certificate cannot be verified, the
 * error message contains `pinIt`, which says how to set the pin.
 */
export async function withUrl<T>(
  place: Where & { url: string },
  use: (client: Farhand) => Promise<T>,
  pinIt = 'set FARHAND_PIN=sha256//…',
): Promise<T> {
  const { url, apiKey } = place;
  assertEncrypted(place);
  const transport = await transportOf(place);
  try {
    return await use(createClient({ baseUrl: url, apiKey, ...transport?.options }));
  } catch (error) {
    if (!(error instanceof FarhandError) || error.code !== 'no_answer') throw error;
    const advice = adviceOn(place, causeOf(error.cause) ?? '', pinIt);
    if (!advice) throw error;
    throw new StartError(`${error.message}; ${advice}`, 1, { cause: error });
  } finally {
    await transport?.close();
  }
}

/** Returns advice on a failed connection, or undefined if no advice fits the cause. */
function adviceOn({ url, pin, ca }: Where & { url: string }, why: string, pinIt: string): string | undefined {
  if (new URL(url).port === '8421') return '8421 is the port for agents; use 8420 for the REST API';
  if (/WRONG_VERSION_NUMBER/.test(why))
    return `the broker at that address speaks plain http: use ${url.replace('https:', 'http:')}`;
  if (pin || ca || !/CERT|VERIFY|ISSUER|SELF_SIGNED/.test(why)) return undefined;
  return `if the broker made its own certificate, ${pinIt}; farhand whoami --data-dir DIR on the broker’s machine prints the pin`;
}

/**
 * Returns the transport that verifies a pinned key or a private CA, or waits longer than fetch; undefined if plain
 * fetch suffices. Loading the transport takes some 40 ms.
 */
export const transportOf = async (place: Where) =>
  place.pin || place.ca || place.isSlow
    ? (await import('./pinned-transport.ts')).createTransport(place)
    : undefined;

/** Creates a client. Throws StartError for a key or URL that the SDK refuses. */
export function createClient(options: FarhandOptions): Farhand {
  try {
    return new Farhand({ onRetry: reportRateLimit, ...options });
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    throw new StartError(`${error.message}; check FARHAND_URL and FARHAND_API_KEY, or run farhand login`);
  }
}

let waitingUntil = 0;

/**
 * Prints that the client waits for the rate limit. If several requests wait at the same time, this is printed only
 * once.
 */
function reportRateLimit({ status }: FarhandError, waitMs: number): void {
  if (status !== 429 || waitMs <= 2_000 || now() < waitingUntil) return;
  waitingUntil = now() + waitMs;
  hint(`farhand: rate limit: waiting ${Math.ceil(waitMs / 1000)} s`);
}

/** Throws StartError if the API key would cross a network unencrypted, unless the user has allowed that. */
export function assertEncrypted({ url, insecure }: Where & { url: string }): void {
  const { protocol, hostname } = URL.parse(url) ?? {};
  if (protocol !== 'http:' && protocol !== 'https:')
    throw new StartError(`${url} is not an http or https URL; check FARHAND_URL, or run farhand login URL`);
  const isLoopback = /^(localhost|.*\.localhost|127(\.\d{1,3}){3}|\[::1\])$/.test(hostname ?? '');
  if (insecure || protocol === 'https:' || isLoopback) return;
  throw new StartError(
    `${url} is not encrypted, so others on the network could read the API key; use https, or FARHAND_INSECURE=1 (login --insecure) in a network you trust`,
  );
}

// ---- The file of `farhand login`, readable only by its owner

interface Login extends Trust {
  url: string;
  api_key: string;
}

export const loginFile = (): string =>
  join(process.env.XDG_CONFIG_HOME || join(homedir(), '.config'), 'farhand', 'config.json');

function readLogin(): Login | undefined {
  const file = loginFile();
  try {
    // The cast is safe: the two required fields are checked below.
    const login = JSON.parse(readFileSync(file, 'utf8')) as Partial<Login> | null;
    const { url, api_key } = login ?? {};
    if (typeof url === 'string' && typeof api_key === 'string') {
      if (statSync(file).mode & 0o077)
        hint(`farhand: other users may read the API key: run chmod 600 ${file}`);
      return { ...login, url, api_key };
    }
  } catch (error) {
    const code = errnoOf(error);
    if (code === 'ENOENT' || code === 'ENOTDIR') return undefined;
    if (code) throw new StartError(reasonOf(atPath(error, file)));
  }
  throw new StartError(`${file} is damaged; run farhand login to write a new one`);
}

export async function writeLogin(login: Login): Promise<void> {
  await mkdir(dirname(loginFile()), { recursive: true, mode: 0o700 });
  await writeDurably(loginFile(), `${JSON.stringify(login, null, 2)}\n`);
}

/** Removes the login file. Returns true if it existed. */
export function removeLogin(): boolean {
  const existed = existsSync(loginFile());
  rmSync(loginFile(), { force: true });
  return existed;
}

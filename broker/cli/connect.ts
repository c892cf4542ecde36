// How the CLI reaches its broker: over HTTP with a key, or over the socket file in the broker's own data directory.
import { setFlagsFromString } from 'node:v8';
import { StartError } from '../../shared/errors.ts';
import { Farhand, type FarhandOptions } from '../../shared/sdk/index.ts';
import type { Where } from './where.ts';

/** Calls `use` with a client; whatever was opened or started for it is ended afterwards. */
export async function withBroker<T>(place: Where, use: (client: Farhand) => Promise<T>): Promise<T> {
  const { dataDir, mayBegin } = place;
  if (dataDir) return (await import('./local.ts')).withSocket(dataDir, use, { mayBegin });
  const { url, apiKey } = place;
  if (!url || !apiKey) {
    throw new StartError(
      'say which broker: farhand login URL, or FARHAND_URL and FARHAND_API_KEY, or --data-dir DIR on the broker’s own box',
    );
  }
  return withUrl({ ...place, url }, use);
}

/** The same over HTTP alone, and before there is a key too. */
export async function withUrl<T>(
  place: Where & { url: string },
  use: (client: Farhand) => Promise<T>,
): Promise<T> {
  const { url, apiKey } = place;
  demandSafe(place, url);
  const way = place.pin || place.ca ? (await import('./tls.ts')).openWay(place) : undefined;
  try {
    return await use(openClient({ baseUrl: url, apiKey, ...way?.options }));
  } finally {
    await way?.close();
  }
}

/** What the SDK says of a key or an address that cannot be one is for who has told it. */
export function openClient(options: FarhandOptions): Farhand {
  try {
    return new Farhand({ ...options, fetch: briefly(options.fetch) });
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    throw new StartError(`${error.message} (FARHAND_URL and FARHAND_API_KEY, or farhand login)`);
  }
}

/**
 * Any fetch has its parser (WebAssembly) compiled once more while it is used, and a process does not end before that is
 * done: 35 ms of a short command's 140. Told as late as this, for flags that V8 did not start with make it compile anew
 * what is kept compiled, Node's own fetch with it.
 */
function briefly(own: typeof fetch | undefined): typeof fetch {
  return (...request) => {
    if (!own) void Response;
    setFlagsFromString('--wasm-tiering-budget=1000000000');
    return (own ?? fetch)(...request);
  };
}

/** A key that is sent in the clear is everybody's. */
function demandSafe({ insecure }: Where, url: string): void {
  if (!URL.canParse(url) || !/^https?:$/.test(new URL(url).protocol)) {
    throw new StartError(`${url} is no http or https URL of a broker`);
  }
  if (insecure || new URL(url).protocol === 'https:' || isLoopback(new URL(url).hostname)) return;
  throw new StartError(
    `${url} is plain http to another machine, which would show the key to the network: use https, or FARHAND_INSECURE=1 (login --insecure) where that network is yours`,
  );
}

function isLoopback(host: string): boolean {
  return /^(localhost|.*\.localhost|127(\.\d{1,3}){3}|\[::1\])$/.test(host);
}

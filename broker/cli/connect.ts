// How the CLI reaches its broker: over HTTP with a key, or over the socket file in the broker's own data directory.
import { StartError } from '../../shared/errors.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { readSaved } from './saved.ts';

export interface Where {
  /** The broker's data directory on this very box. */
  dataDir: string | undefined;
  url: string | undefined;
  apiKey: string | undefined;
  /** `sha256//BASE64` of the only public key that the broker may have; several with semicolons, as curl has it. */
  pin?: string | undefined;
  /** A file with the authority that the broker's certificate is of. */
  ca?: string | undefined;
  /** The key may cross a network in the clear. */
  insecure?: boolean | undefined;
}

/** The data directory if one is told; else the environment, which outweighs what `farhand login` saved. */
export function where(options: { dataDir?: string }): Where {
  const { FARHAND_DATA_DIR, FARHAND_URL, FARHAND_API_KEY, FARHAND_PIN, FARHAND_CA, FARHAND_INSECURE } =
    process.env;
  const dataDir = options.dataDir ?? (FARHAND_URL ? undefined : FARHAND_DATA_DIR);
  const saved = dataDir ? undefined : readSaved();
  // What is saved of another broker is not for this one.
  const same = saved && (!FARHAND_URL || FARHAND_URL === saved.url) ? saved : undefined;
  return {
    dataDir,
    url: FARHAND_URL || saved?.url,
    apiKey: FARHAND_API_KEY || same?.api_key,
    pin: FARHAND_PIN || same?.pin,
    ca: FARHAND_CA || same?.ca,
    insecure: FARHAND_INSECURE === '1' || same?.insecure,
  };
}

/** Calls `use` with a client; whatever was opened or started for it is ended afterwards. */
export async function withBroker<T>(place: Where, use: (client: Farhand) => Promise<T>): Promise<T> {
  if (place.dataDir) return (await import('./local.ts')).withSocket(place.dataDir, use);
  const { url, apiKey } = place;
  if (!url || !apiKey) {
    throw new StartError(
      'say which broker: farhand login URL, or FARHAND_URL and FARHAND_API_KEY, or --data-dir DIR on the broker’s own box',
    );
  }
  demandSafe(place, url);
  const way = place.pin || place.ca ? (await import('./tls.ts')).openWay(place) : undefined;
  try {
    return await use(new Farhand({ baseUrl: url, apiKey, ...way?.options }));
  } catch (error) {
    throw explained(error, url);
  } finally {
    await way?.close();
  }
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

/** fetch says no more than that it failed; why is in its cause. */
function explained(error: unknown, url: string): unknown {
  if (!(error instanceof TypeError) || !/fetch failed/.test(error.message)) return error;
  const cause = error.cause instanceof Error ? error.cause : undefined;
  const why = cause?.message || (cause && 'code' in cause && String(cause.code)) || 'nobody answers';
  return new StartError(`no broker answers at ${url}: ${why}\nfarhand doctor looks closer.`, 1, {
    cause: error,
  });
}

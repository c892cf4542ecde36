// Which broker is meant, and how it is known.
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
  /** A data directory that is new may become a broker's. */
  mayBegin?: boolean | undefined;
}

/** The data directory if one is told; else the environment, which outweighs what `farhand login` saved. */
export function where(options: { dataDir?: string }): Where {
  const { FARHAND_DATA_DIR, FARHAND_URL, FARHAND_API_KEY, FARHAND_PIN, FARHAND_CA, FARHAND_INSECURE } =
    process.env;
  const dataDir = options.dataDir ?? (FARHAND_URL ? undefined : FARHAND_DATA_DIR);
  const saved = dataDir ? undefined : readSaved();
  // What is saved of another broker is not for this one.
  const url = brokerUrl(FARHAND_URL || saved?.url);
  const same = brokerUrl(saved?.url) === url ? saved : undefined;
  return {
    dataDir,
    url,
    apiKey: FARHAND_API_KEY || same?.api_key,
    pin: FARHAND_PIN || same?.pin,
    ca: FARHAND_CA || same?.ca,
    insecure: FARHAND_INSECURE === '1' || same?.insecure,
  };
}

/** One broker has one URL, however it was told; what is none is left for who reports it. */
export function brokerUrl<T extends string | undefined>(text: T): T | string {
  const url = text === undefined ? null : URL.parse(text.trim());
  if (!url || url.username || url.password) return text;
  return `${url.origin}${url.pathname}`.replace(/\/+$/, '').replace(/\/api\/v1$/, '');
}

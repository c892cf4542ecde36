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

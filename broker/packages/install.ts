// How a machine gets its agent with a single line: the script as this broker gives it, and the line.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { home, shipped } from '../../shared/home.ts';
import { isLoopback } from '../../shared/loopback.ts';

/** How this broker is reached. */
export interface Reached {
  /** Of the REST API. */
  url: string;
  /** HOST:PORT where agents dial in; empty when it takes none. */
  grpc: string;
  /** `sha256//BASE64` of the key behind the URL, where its certificate is the broker's own; else empty. */
  pin: string;
}

export interface Words {
  install: string | null;
  install_missing: string | null;
}

const template = (): string =>
  readFileSync(
    shipped('install.sh', () => join(home, 'broker/packages/install.sh')),
    'utf8',
  );

/** The token goes in by the pipe, behind a builtin of the shell: no list of processes ever shows it. */
export function wordsFor(token: string, { url, pin }: Reached): Words {
  if (!url)
    return { install: null, install_missing: 'the broker does not run: make the token while it does' };
  const { protocol, hostname } = new URL(url);
  if (protocol !== 'https:' && !isLoopback(hostname)) {
    return {
      install: null,
      install_missing: `over ${url} others could replace what the machine runs: give the broker TLS, or --public-url with https`,
    };
  }
  const pinned = pin ? ` -k --pinnedpubkey ${pin}` : '';
  const script = `curl -fsSL${pinned} ${quoted(`${trimmed(url)}/install.sh`)}`;
  return { install: `{ echo FARHAND_JOIN_TOKEN=${token}; ${script}; } | sudo sh`, install_missing: null };
}

export function scriptFor({ url, grpc, pin }: Reached): string {
  const port = grpc.slice(grpc.lastIndexOf(':') + 1);
  const broker = grpc ? `${new URL(url).hostname}:${port}` : '';
  const values: Record<string, string> = { FROM: trimmed(url), PIN: pin, BROKER: broker };
  return template().replace(/@(FROM|PIN|BROKER)@/g, (_whole, name: string) => quoted(values[name] ?? ''));
}

function trimmed(url: string): string {
  return url.replace(/\/+$/, '');
}

/** As one word of a shell; bare where that is the same. */
function quoted(text: string): string {
  return /^[\w.:/@%+-]+$/.test(text) ? text : `'${text.replaceAll("'", String.raw`'\''`)}'`;
}

// Creates the command line that installs an agent, and install.sh, the script that this command line downloads and
// runs.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { isLoopback } from '../../shared/loopback.ts';
import { home, shipped } from '../../shared/paths-in-checkout-or-package.ts';
import { quoteForShell } from '../../shared/quote-for-shell.ts';

/** Addresses at which machines connect to this broker. */
export interface Addresses {
  /** URL of the REST API. */
  url: string;
  /** HOST:PORT to which agents connect; empty if no agent can connect. */
  grpc: string;
  /** Value of --public-grpc: HOST:PORT to which agents connect; empty if it is not set. */
  publicGrpc: string;
  /** `sha256//BASE64` of the certificate's public key if the broker's own CA issued it, otherwise empty. */
  pin: string;
}

export interface InstallLine {
  install: string | null;
  install_missing: string | null;
}

/**
 * Creates the command line that installs an agent. A pipe passes the token to the script, so that the token appears in
 * no list of processes.
 */
export function installLineFor(
  token: string,
  machineName: string | undefined,
  { url, pin }: Addresses,
): InstallLine {
  if (!url) return missingLine('the broker is not running; create the token while it runs');
  const { protocol, hostname } = new URL(url);
  if (everyAddress.includes(hostname))
    return missingLine('the broker has no public address; start it with --public-url https://HOST:8420');
  if (protocol !== 'https:' && !isLoopback(hostname))
    return missingLine(
      `${url} is not encrypted, so others on the network could replace the downloaded agent; start the broker with --tls, or with an https --public-url`,
    );
  const secured = protocol === 'https:' ? ` --proto '=https'` : '';
  const pinned = pin ? ` -k --pinnedpubkey ${pin}` : '';
  // If the download fails, `sudo sh` reads `exit 1` instead of the script.
  const script = `curl -fsSL${secured}${pinned} ${quoteForShell(`${trimmed(url)}/install.sh`)} || echo exit 1`;
  const options = machineName === undefined ? '' : ` -s -- --name=${quoteForShell(machineName)}`;
  const install = `{ echo FARHAND_JOIN_TOKEN=${token}; ${script}; } | sudo sh${options}`;
  return { install, install_missing: null };
}

const everyAddress = ['0.0.0.0', '[::]'];

function missingLine(install_missing: string): InstallLine {
  return { install: null, install_missing };
}

export function scriptFor({ url, grpc, publicGrpc, pin }: Addresses): string {
  const port = grpc.slice(grpc.lastIndexOf(':') + 1);
  const broker = publicGrpc || (grpc && `${new URL(url).hostname}:${port}`);
  const values: Record<string, string> = { FROM: trimmed(url), PIN: pin, BROKER: broker };
  const template = readFileSync(
    shipped('install.sh', () => join(home, 'broker/agent-packages/install.sh')),
    'utf8',
  );
  return template.replace(/@(FROM|PIN|BROKER)@/g, (_whole, name: string) =>
    quoteForShell(values[name] ?? ''),
  );
}

function trimmed(url: string): string {
  return url.replace(/\/+$/, '');
}

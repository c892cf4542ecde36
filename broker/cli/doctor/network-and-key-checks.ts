// The network checks of farhand doctor: the broker's URL, certificate, key, version, ports and machines.
import { mostSkewMs, now } from '../../../shared/clock.ts';
import { type Finding, fail, ok, reason, warn } from '../../../shared/doctor/check-result.ts';
import { reachPort } from '../../../shared/doctor/reachable-port.ts';
import { StartError } from '../../../shared/errors.ts';
import { hostPort } from '../../../shared/read-settings.ts';
import { type Farhand, FarhandError, type FarhandOptions } from '../../../shared/sdk/index.ts';
import { isOlder, version } from '../../../shared/version.ts';
import { assertEncrypted, brokerUrl, createClient, transportOf, type Where } from '../connect-to-broker.ts';
import { clean, span } from '../print.ts';

const setClock = 'synchronize the clock with a time server (timedatectl set-ntp true)';
const soonMs = 7 * 86_400_000;

export async function examineBroker(place: Where): Promise<Finding[]> {
  const { url, apiKey, insecure } = place;
  const noUrl = url ? `${url} is not a URL` : 'no broker is configured';
  if (!url || !URL.canParse(url)) return [fail('broker', noUrl, 'run farhand login URL, or set FARHAND_URL')];
  const transport = await transportOf(place);
  try {
    const reached = await reachUrl(url, transport?.options.fetch ?? fetch);
    if (reached.some(({ state }) => state === 'fail')) return reached;
    if (!apiKey)
      return [
        ...reached,
        fail('key', 'no API key is configured', 'run farhand login, or set FARHAND_API_KEY'),
      ];
    if (insecure && !url.startsWith('https:'))
      reached.push(
        warn(
          'network',
          'the API key is sent unencrypted',
          'start the broker with --tls, and use its https URL',
        ),
      );
    try {
      assertEncrypted({ ...place, url });
    } catch (error) {
      return [
        ...reached,
        fail('network', reason(error), 'start the broker with --tls, and use its https URL'),
      ];
    }
    const options = { baseUrl: url, apiKey, retries: 0, ...transport?.options };
    return [...reached, ...(await examineWithKey(options))];
  } finally {
    await transport?.close();
  }
}

async function reachUrl(url: string, ask: typeof fetch): Promise<Finding[]> {
  try {
    const before = now();
    const response = await ask(`${brokerUrl(url)}/readyz`, { signal: AbortSignal.timeout(5_000) });
    await response.text();
    return [readiness(url, response), ...clock(response, before)];
  } catch (error) {
    return [fail('broker', `${url} does not answer: ${clean(reason(error))}`, adviceOn(reason(error)))];
  }
}

function readiness(url: string, { ok: ready, status }: Response): Finding {
  if (ready) return ok('broker', `${url} answers`);
  if (status === 503)
    return warn(
      'broker',
      `${url} is not ready for requests`,
      'wait until the broker has started, or read its log',
    );
  const mend = 'check that the URL belongs to a broker and has no path';
  return fail('broker', `${url} answers with HTTP status ${status}`, mend);
}

function adviceOn(why: string): string {
  if (/self.signed|unable to (verify|get)|pinned|certificate|altnames/i.test(why))
    return 'if the broker made its own certificate, set FARHAND_PIN=sha256//… (tls_pin of GET /info) or FARHAND_CA=FILE';
  if (/ENOTFOUND|EAI_AGAIN/.test(why)) return 'check the host name';
  if (/wrong version number|packet length/i.test(why)) return 'the server speaks plain http; check the URL';
  return 'check host, port and firewalls; run farhand doctor --data-dir DIR on the broker’s machine';
}

function clock({ headers }: Response, before: number): Finding[] {
  const there = Date.parse(headers.get('date') ?? '');
  if (Number.isNaN(there)) return [];
  // One second is subtracted, because the Date header has whole seconds.
  const skew = Math.max(0, Math.abs(there - (before + now()) / 2) - 1000);
  if (skew < mostSkewMs) return [ok('clock', 'this machine’s clock agrees with the broker’s')];
  return [
    warn(
      'clock',
      `this machine’s clock differs by ${span(skew)} from the broker’s`,
      `on both machines: ${setClock}`,
    ),
  ];
}

async function examineWithKey(options: FarhandOptions): Promise<Finding[]> {
  try {
    const client = createClient(options);
    const me = await client.keys.me();
    const info = await client.service.info();
    const port = await agentPort(info.grpc_address, options.baseUrl);
    return [key(me), sameVersion(info.version), port, ...(await machines(client, me.scopes, info.version))];
  } catch (error) {
    // createClient() throws StartError for a text that cannot be a key, such as two lines.
    if (!(error instanceof StartError || error instanceof FarhandError)) throw error;
    const code = error instanceof FarhandError ? error.code : '';
    const what = `${clean(error.message)}${code && ` (${clean(code)})`}`;
    // The code `unavailable` reports a problem of the broker, not of the key.
    if (code === 'unavailable')
      return [fail('broker', what, 'run farhand-broker doctor on the broker’s machine, and read its log')];
    return [fail('key', what, 'store another key with farhand login')];
  }
}

function key({ name, scopes, expires_at }: Awaited<ReturnType<Farhand['keys']['me']>>): Finding {
  const what = `${clean(name)}, with ${scopes.join(', ')}`;
  const left = expires_at === null ? Number.POSITIVE_INFINITY : Date.parse(expires_at) - now();
  if (left > soonMs) return ok('key', what);
  return warn(
    'key',
    `${what}; expires in ${span(left)}`,
    'create a key (farhand auth create-key), then run farhand login',
  );
}

function sameVersion(there: string): Finding {
  if (there === version) return ok('version', version);
  const what = `this program has version ${version}, but the broker has version ${clean(there)}`;
  return warn('version', what, 'install the CLI in the same version as the broker');
}

async function agentPort(address: string, url: string): Promise<Finding> {
  const listening = hostPort.safeParse(address).data;
  if (!listening)
    return warn(
      'agents’ port',
      `the broker’s address for agents is not HOST:PORT: "${clean(address)}"`,
      'start the broker with --grpc HOST:PORT or --public-grpc HOST:PORT',
    );
  // If the broker listens on every address, the host of the URL is tried.
  const everywhere = /^(0\.0\.0\.0|::)$/.test(listening.host);
  const host = everywhere ? new URL(url).hostname.replace(/^\[|\]$/g, '') : listening.host;
  try {
    await reachPort(host, listening.port);
    return ok('agents’ port', `${host}:${listening.port} answers`);
  } catch (error) {
    const what = `${host}:${listening.port} does not answer from here: ${reason(error)}`;
    return warn('agents’ port', what, 'if agents connect from this network, open the port in the firewall');
  }
}

async function machines(client: Farhand, scopes: readonly string[], there: string): Promise<Finding[]> {
  if (!scopes.some((scope) => scope === 'admin' || scope === 'machines:read')) return [];
  // The field `upgrade` is requested only from a broker of this version, because an older one may refuse it.
  const include = `agent_version,clock_offset_ms${there === version ? ',upgrade' : ''}`;
  const all = await Array.fromAsync(client.machines.list({ sort: 'name', include, limit: 100 }));
  if (all.length === 0) return [warn('machines', 'no machine has joined', 'run farhand join-tokens create')];
  const online = all.filter(({ status }) => status === 'online');
  const away = all.filter((one) => !online.includes(one)).map(({ name }) => name);
  const old = all
    .filter(({ agent_version = '' }) => isOlder(agent_version, there))
    .map(({ name, agent_version }) => `${name} (${agent_version})`);
  const unpinned = all.filter(({ upgrade }) => upgrade?.kind && upgrade.key === null).map(({ name }) => name);
  const apart = online
    .filter(({ clock_offset_ms = 0 }) => Math.abs(clock_offset_ms) > mostSkewMs)
    .map(({ name, clock_offset_ms = 0 }) => {
      return `${name} (${span(Math.abs(clock_offset_ms))} ${clock_offset_ms < 0 ? 'behind' : 'ahead'})`;
    });
  const onEach = 'on each of these machines';
  return [
    ...(away.length > 0
      ? warnOf('machines', 'these machines are offline', away, `run farhand-agent doctor ${onEach}`)
      : [ok('machines', `all ${all.length} machines are online`)]),
    ...warnOf(
      'agents',
      `these agents are older than the broker (${there})`,
      old,
      'on these machines, install the agent in the same version as the broker',
    ),
    ...warnOf(
      'upgrades',
      'these agents trust no signing key, so the broker cannot upgrade them',
      unpinned,
      `${onEach}, run farhand-agent trust-key FILE as root; FILE is the public key that verifies your packages`,
    ),
    ...warnOf('clocks', 'these clocks differ from the broker’s', apart, `${onEach}: ${setClock}`),
  ];
}

/** Returns a warning that names the first ten of `machines`; no finding if `machines` is empty. */
function warnOf(check: string, what: string, machines: string[], mend: string): Finding[] {
  if (machines.length === 0) return [];
  const more = machines.length > 10 ? `, and ${machines.length - 10} more` : '';
  return [warn(check, `${what}: ${clean(machines.slice(0, 10).join(', '))}${more}`, mend)];
}

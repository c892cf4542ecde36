// The broker as this command line sees it: reached, known, with a key that is good.
import { mostSkewMs, now } from '../../../shared/clock.ts';
import { type Finding, fail, ok, reason, warn } from '../../../shared/doctor/finding.ts';
import { hostPortOf, reachPort } from '../../../shared/doctor/reach.ts';
import { StartError } from '../../../shared/errors.ts';
import { type Farhand, FarhandError, type FarhandOptions } from '../../../shared/sdk/index.ts';
import { version } from '../../../shared/version.ts';
import { openClient } from '../connect.ts';
import { clean, span } from '../output.ts';
import { every } from '../verb.ts';
import type { Where } from '../where.ts';

const setClock = 'let it follow a time server (timedatectl set-ntp true)';
const soonMs = 7 * 86_400_000;

export async function examineBroker(place: Where): Promise<Finding[]> {
  const { url, apiKey } = place;
  if (!url || !URL.canParse(url)) {
    return [fail('broker', url ? `${url} is no URL` : 'none is told', 'farhand login URL, or FARHAND_URL')];
  }
  const way = place.pin || place.ca ? (await import('../tls.ts')).openWay(place) : undefined;
  try {
    const reached = await reachUrl(url, way?.options.fetch ?? fetch);
    if (reached.some(({ state }) => state === 'fail')) return reached;
    if (!apiKey) return [...reached, fail('key', 'none is told', 'farhand login, or FARHAND_API_KEY')];
    const keyed = await examineWithKey({ baseUrl: url, apiKey, retries: 0, ...way?.options });
    return [...reached, ...clear(place, url), ...keyed];
  } finally {
    await way?.close();
  }
}

async function reachUrl(url: string, ask: typeof fetch): Promise<Finding[]> {
  try {
    const before = now();
    const response = await ask(`${url.replace(/\/+$/, '').replace(/\/api\/v1$/, '')}/readyz`, {
      signal: AbortSignal.timeout(5_000),
    });
    await response.text();
    return [readiness(url, response), ...clock(response, before)];
  } catch (error) {
    return [fail('broker', `${url} does not answer: ${clean(reason(error))}`, mendOf(reason(error)))];
  }
}

function readiness(url: string, { ok: ready, status }: Response): Finding {
  if (ready) return ok('broker', `${url} answers`);
  if (status === 503) return warn('broker', `${url} takes no work just now`, 'wait, then look at its log');
  return fail(
    'broker',
    `${url} answers ${status}`,
    'is that a broker? Leave out everything after host and port',
  );
}

function mendOf(why: string): string {
  if (/self.signed|unable to (verify|get)|pinned|certificate|altnames/i.test(why)) {
    return 'the broker’s own certificate: FARHAND_PIN=sha256//… (GET /info tells it as tls_pin) or FARHAND_CA=FILE';
  }
  if (/ENOTFOUND|EAI_AGAIN/.test(why)) return 'is the name right?';
  if (/wrong version number|packet length/i.test(why)) return 'it speaks plain http: is the URL right?';
  return 'does it run (farhand doctor --data-dir DIR there), is a firewall between, are host and port right?';
}

function clock({ headers }: Response, before: number): Finding[] {
  const there = Date.parse(headers.get('date') ?? '');
  if (Number.isNaN(there)) return [];
  // The header has whole seconds.
  const skew = Math.max(0, Math.abs(there - (before + now()) / 2) - 1000);
  if (skew < mostSkewMs) return [ok('clock', 'as the broker’s')];
  return [warn('clock', `${span(skew)} apart from the broker’s`, `on both: ${setClock}`)];
}

/** Said once more where somebody has allowed it. */
function clear({ insecure }: Where, url: string): Finding[] {
  if (!insecure || url.startsWith('https:')) return [];
  return [warn('network', 'the key crosses it in the clear', 'serve https: farhand-broker --tls')];
}

async function examineWithKey(options: FarhandOptions): Promise<Finding[]> {
  try {
    const client = openClient(options);
    const me = await client.keys.me();
    const info = await client.service.info();
    return [
      key(me),
      sameVersion(info.version),
      await grpcPort(info.grpc_address, options.baseUrl),
      ...(await machines(client, me.scopes, info.version)),
    ];
  } catch (error) {
    // A key that cannot be one, such as two lines.
    if (error instanceof StartError)
      return [fail('key', clean(error.message), 'farhand login takes another one')];
    if (!(error instanceof FarhandError)) throw error;
    return [fail('key', `${clean(error.message)} (${clean(error.code)})`, 'farhand login takes another one')];
  }
}

function key({ name, scopes, expires_at }: Awaited<ReturnType<Farhand['keys']['me']>>): Finding {
  const what = `${clean(name)}, may ${scopes.join(', ')}`;
  const left = expires_at === null ? Number.POSITIVE_INFINITY : Date.parse(expires_at) - now();
  return left > soonMs
    ? ok('key', what)
    : warn('key', `${what}; ends in ${span(left)}`, 'farhand auth create-key, farhand login');
}

function sameVersion(there: string): Finding {
  if (there === version) return ok('version', version);
  return warn(
    'version',
    `this is ${version}, the broker ${clean(there)}`,
    'use the farhand of the broker’s version',
  );
}

async function grpcPort(address: string, url: string): Promise<Finding> {
  const told = hostPortOf(address);
  if (!told) return warn('agents’ port', 'the broker tells none', 'start it with --grpc HOST:PORT');
  // Where it listens everywhere, it is where the URL is.
  const host = /^(0\.0\.0\.0|::)$/.test(told.host)
    ? new URL(url).hostname.replace(/^\[|\]$/g, '')
    : told.host;
  try {
    await reachPort(host, told.port);
    return ok('agents’ port', `${host}:${told.port} answers`);
  } catch (error) {
    const what = `${host}:${told.port} does not answer from here: ${reason(error)}`;
    return warn('agents’ port', what, 'agents need it: open it in the firewall between');
  }
}

async function machines(client: Farhand, scopes: readonly string[], version: string): Promise<Finding[]> {
  if (!scopes.some((scope) => scope === 'admin' || scope === 'machines:read')) return [];
  const include = 'agent_version,clock_offset_ms';
  const all = await every((page) => client.machines.list({ sort: 'name', include, ...page }));
  if (all.length === 0) return [warn('machines', 'there is none', 'farhand join-tokens create')];
  const online = all.filter(({ status }) => status === 'online');
  const away = all.filter((one) => !online.includes(one));
  const old = all.filter(({ agent_version = '' }) => isOlder(agent_version, version));
  const apart = online.filter(({ clock_offset_ms = 0 }) => Math.abs(clock_offset_ms) > mostSkewMs);
  return [
    away.length === 0
      ? ok('machines', `all ${all.length} online`)
      : warn('machines', `offline: ${some(away.map(({ name }) => name))}`, 'on each: farhand-agent doctor'),
    ...aged(old, version),
    ...skewed(apart),
  ];
}

type Listed = Awaited<ReturnType<Farhand['machines']['list']>>['items'];

function aged(old: Listed, version: string): Finding[] {
  if (old.length === 0) return [];
  const what = some(old.map(({ name, agent_version }) => `${name} (${agent_version})`));
  return [
    warn('agents', `older than the broker (${version}): ${what}`, 'install the broker’s version there'),
  ];
}

function skewed(apart: Listed): Finding[] {
  if (apart.length === 0) return [];
  const off = ({ name, clock_offset_ms = 0 }: Listed[number]): string =>
    `${name} (${span(Math.abs(clock_offset_ms))} ${clock_offset_ms < 0 ? 'behind' : 'ahead'})`;
  return [warn('clocks', `apart from the broker’s: ${some(apart.map(off))}`, `there: ${setClock}`)];
}

/** The first ten by name. */
function some(texts: string[]): string {
  const more = texts.length > 10 ? `, and ${texts.length - 10} more` : '';
  return `${clean(texts.slice(0, 10).join(', '))}${more}`;
}

/** By the three numbers of a version; what has none counts as no older. */
function isOlder(version: string, than: string): boolean {
  const [a, b] = [version, than].map((text) => /^(\d+)\.(\d+)\.(\d+)/.exec(text)?.slice(1).map(Number));
  const at = a?.findIndex((part, index) => part !== b?.[index]) ?? -1;
  return at >= 0 && (a?.[at] ?? 0) < (b?.[at] ?? 0);
}

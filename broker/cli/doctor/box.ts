// A data directory on this box, a broker's or an agent's: who may read it, what it holds, whether there is room.
import { readFile, stat, statfs } from 'node:fs/promises';
import { join } from 'node:path';
import { readRegularFile } from '../../../shared/regular-file.ts';
import { size } from '../output.ts';
import { refusedIn } from '../owner.ts';
import { type Finding, fail, ok, reason, warn } from './finding.ts';
import { hostPortOf, reachBroker, reachPort, reachSocketFile } from './reach.ts';
import { unitState } from './unit.ts';

const leastFree = 1024 ** 3;

export async function examineBrokerBox(dataDir: string): Promise<Finding[]> {
  const kept = await directory(dataDir, ['state.json', 'history.db', 'authority.json']);
  if (kept.some(({ state }) => state === 'fail')) return kept;
  const running = await listens(() => reachSocketFile(join(dataDir, 'broker.sock')));
  return [
    ...kept,
    running
      ? ok('broker here', 'runs')
      : warn(
          'broker here',
          'does not run',
          'systemctl start farhand-broker, or farhand-broker --data-dir DIR',
        ),
    ...(running ? [] : await ports()),
    ...(await unitState('farhand-broker')),
  ];
}

/** A broker that does not run may be one that finds its ports taken. */
async function ports(): Promise<Finding[]> {
  const taken: number[] = [];
  for (const port of [8420, 8421]) if (await listens(() => reachPort('127.0.0.1', port))) taken.push(port);
  if (taken.length === 0) return [ok('ports', '8420 and 8421 are free')];
  const what = `${taken.join(' and ')}: somebody else listens there`;
  return [warn('ports', what, `ss -ltnp tells who; or start the broker with --http and --grpc elsewhere`)];
}

async function listens(reach: () => Promise<void>): Promise<boolean> {
  return reach().then(
    () => true,
    () => false,
  );
}

export async function examineAgentBox(dataDir: string, told: string | undefined): Promise<Finding[]> {
  const kept = await directory(dataDir, ['identity.json']);
  if (kept.some(({ state }) => state === 'fail')) return kept;
  return [...kept, ...(await identity(dataDir, told)), ...(await unitState('farhand-agent'))];
}

async function identity(dataDir: string, told: string | undefined): Promise<Finding[]> {
  const found = await readIdentity(join(dataDir, 'identity.json'));
  if (typeof found === 'string') {
    const join = 'farhand join-tokens create, then farhand-agent --join-token-file FILE --broker HOST:PORT';
    const mend = found.endsWith('is damaged') ? `remove it and join again: ${join}` : join;
    return [fail('identity', found, mend)];
  }
  const joined = ok('identity', found.machine_id);
  const address = told ?? (await configured());
  const at = address === undefined ? undefined : hostPortOf(address);
  if (!at)
    return [joined, warn('its broker', 'is not told', 'say --broker HOST:PORT, where the agent dials')];
  try {
    await reachBroker(at.host, at.port, found.ca_certificate);
    return [joined, ok('its broker', `${address} answers, and is the one that it joined`)];
  } catch (error) {
    const why = reason(error);
    const other = /certificate|self.signed|issuer|verify/i.test(why);
    const mend = other
      ? 'another broker is there now: the agent joins it with --data-dir elsewhere and a new token'
      : 'does the broker run, is its port open to this machine?';
    return [joined, fail('its broker', `${address}: ${why}`, mend)];
  }
}

async function readIdentity(file: string): Promise<{ machine_id: string; ca_certificate: string } | string> {
  let text: string | undefined;
  try {
    text = (await readRegularFile(file))?.text;
  } catch (error) {
    return reason(error);
  }
  if (text === undefined) return `this machine has not joined: there is no ${file}`;
  try {
    const value: unknown = JSON.parse(text);
    if (isIdentity(value)) return value;
  } catch {
    // Said below.
  }
  return `${file} is damaged`;
}

function isIdentity(value: unknown): value is { machine_id: string; ca_certificate: string } {
  if (typeof value !== 'object' || value === null) return false;
  if (!('machine_id' in value) || !('ca_certificate' in value)) return false;
  return typeof value.machine_id === 'string' && typeof value.ca_certificate === 'string';
}

/** Of the service's own settings. */
async function configured(): Promise<string | undefined> {
  const text = await readFile('/etc/farhand/agent.toml', 'utf8').catch(() => '');
  return /^\s*broker\s*=\s*["']([^"']+)["']/m.exec(text)?.[1];
}

/** It and what is in it must be its owner's alone, and there must be room. */
async function directory(dataDir: string, files: string[]): Promise<Finding[]> {
  const refused = refusedIn(dataDir);
  if (refused) return [fail('directory', refused, 'sudo farhand doctor …')];
  const there = await stat(dataDir).catch((error: unknown) => reason(error));
  if (typeof there === 'string')
    return [fail('directory', there, 'is --data-dir right, and may you read it?')];
  const open: string[] = [];
  const foreign: string[] = [];
  for (const name of ['', ...files]) {
    const one = await stat(join(dataDir, name)).catch(() => undefined);
    if (one && one.mode & 0o077) open.push(name || dataDir);
    if (one && one.uid !== there.uid) foreign.push(name);
  }
  return [modes(dataDir, open), ...owners(dataDir, foreign), await room(dataDir)];
}

function modes(dataDir: string, open: string[]): Finding {
  if (open.length === 0) return ok('directory', `${dataDir} is its owner’s alone`);
  return fail(
    'directory',
    `others may use ${open.join(', ')}`,
    `chmod -R go= ${dataDir}; keys may be known already`,
  );
}

function owners(dataDir: string, foreign: string[]): Finding[] {
  if (foreign.length === 0) return [];
  const what = `${foreign.join(', ')} is not of the owner of ${dataDir}`;
  return [fail('owner', what, `chown -R --reference=${dataDir} ${dataDir}`)];
}

async function room(dataDir: string): Promise<Finding> {
  const { bavail, bsize, blocks } = await statfs(dataDir);
  const free = bavail * bsize;
  const what = `${size(free)} free of ${size(blocks * bsize)}`;
  return free > leastFree ? ok('disk', what) : warn('disk', what, 'make room, or keep less: --keep-history');
}

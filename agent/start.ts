// Starts all parts of an agent, and closes them in reverse order.
import { rm } from 'node:fs/promises';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { backoff } from '../shared/backoff.ts';
import { monotonic, sleep } from '../shared/clock.ts';
import { takeDirectory } from '../shared/directory-lock.ts';
import { AppError } from '../shared/errors.ts';
import type { Logger } from '../shared/logger.ts';
import { reasonOf } from '../shared/system-error-messages.ts';
import { AuditLog } from './audit-log/index.ts';
import { checkRoots, createFiles } from './files/index.ts';
import { createInventory } from './inventory/index.ts';
import { loadIdentity, markRemoved, readTokenFile } from './join-or-load-identity.ts';
import { BrokerAddresses } from './link/broker-addresses.ts';
import { type Identity, keepLinked, type LinkOptions, Removed } from './link/index.ts';
import { MetricsReader } from './metrics.ts';
import { startProcesses } from './processes/index.ts';
import { protectedPathsOf } from './protected-paths.ts';
import type { AgentSettings } from './settings-schema.ts';
import { Upgrades } from './upgrade/index.ts';

export interface Agent {
  machineId: string;
  /** Resolves when the agent has ended after close(). Rejects with StartError if the broker has removed the machine. */
  ended: Promise<void>;
  /**
   * True while the loop that connects to brokers makes progress. Its wait before the next attempt counts as progress.
   */
  alive(): boolean;
  /** Sends a farewell to the broker, ends running commands, and releases the data directory. */
  close(): Promise<void>;
}

/** Functions that close the agent's parts; closeAll() calls the last one first. */
type Closers = (() => unknown)[];

/**
 * Starts an agent. The agent joins the broker if needed, and stays linked until it is closed. The agent first calls
 * `onLinkChange` with false. Throws StartError.
 */
export async function startAgent(
  settings: AgentSettings,
  log: Logger,
  onLinkChange: LinkOptions['onLinkChange'] = () => {},
): Promise<Agent> {
  warnOfLocks(settings, log);
  const closers: Closers = [takeDirectory(settings.data_dir, 'agent')];
  try {
    return await assemble(settings, log, closers, onLinkChange);
  } catch (error) {
    await closeAll(closers);
    throw error;
  }
}

async function closeAll(closers: Closers): Promise<void> {
  for (const closer of closers.reverse()) await closer();
}

async function assemble(
  settings: AgentSettings,
  log: Logger,
  closers: Closers,
  onLinkChange: LinkOptions['onLinkChange'],
): Promise<Agent> {
  const directory = settings.data_dir;
  const stopping = new AbortController();
  // The roots are checked first, because joining uses up the join token.
  await checkRoots(settings.root);
  const [first = ''] = settings.broker;
  const identity = await joined(settings, log, stopping.signal, () => onLinkChange(false, first));
  const auditLog = await AuditLog.open(directory, log);
  closers.push(() => auditLog.close());
  const services = await startServices(settings, log, closers);
  let dueBy = Number.POSITIVE_INFINITY;
  const onProgress = (ms: number): void => {
    dueBy = monotonic() + ms;
  };
  onLinkChange(false, first);
  const brokers = await BrokerAddresses.open(directory, settings.broker, log);
  const { allow: capabilities, root: roots } = settings;
  const watching = { onProgress, onLinkChange };
  const options = { brokers, identity, capabilities, roots, log, auditLog, ...services, ...watching };
  const ended = finishing(keepLinked(options, stopping.signal), directory, closers);
  // `ended` may reject before the caller awaits it. Without this handler, that would be an unhandled rejection.
  ended.catch(() => undefined);
  return {
    machineId: identity.machineId,
    ended,
    alive: () => monotonic() < dueBy,
    async close() {
      stopping.abort();
      await ended.catch(() => undefined);
    },
  };
}

async function startServices(settings: AgentSettings, log: Logger, closers: Closers) {
  const { data_dir: directory, allow, root: roots } = settings;
  const mayRunAs = allow.includes('user');
  const processes = await startProcesses({ directory: join(directory, 'processes'), log, mayRunAs });
  closers.push(() => processes.stop());
  const { secret: forbidden, program: fixed } = protectedPathsOf(settings);
  const own = () => [process.pid, ...processes.pids()];
  const home = homedir();
  const files = await createFiles({ roots, home, forbidden, fixed, processes: own, directory, log });
  const metrics = new MetricsReader();
  const getMetrics = async () => ({ metrics: await metrics.report() });
  const { upgrade_dir, hold_version: holdVersion } = settings;
  const upgrades = new Upgrades({ directory: upgrade_dir, holdVersion, processes, log });
  closers.push(() => upgrades.close());
  return {
    handlers: { ...files, ...processes, ...createInventory(), ...upgrades.handlers, getMetrics },
    processes,
    upgrades,
    report: async () => (allow.includes('metrics') ? metrics.report() : null),
  };
}

async function finishing(linked: Promise<void>, directory: string, closers: Closers): Promise<void> {
  try {
    await linked;
  } catch (error) {
    if (error instanceof Removed) await markRemoved(directory);
    throw error;
  } finally {
    await closeAll(closers);
  }
}

/**
 * Returns this machine's identity. A machine that has none first joins a broker, with retries. Afterwards the file of
 * the join token is removed, unless it is read-only, like the secrets of a container.
 */
async function joined(
  { data_dir, broker: brokers, name, tags, join_token, join_token_file: file }: AgentSettings,
  log: Logger,
  signal: AbortSignal,
  waits: () => void,
): Promise<Identity> {
  // The file may be missing, because the agent removes it after joining.
  const joinToken = join_token || (file ? await readTokenFile(file, true) : undefined);
  const joinTokenFile = join_token ? undefined : file;
  const wait = backoff();
  for (let attempt = Math.floor(Math.random() * brokers.length); ; attempt += 1) {
    const broker = brokers[attempt % brokers.length] ?? '';
    try {
      const identity = await loadIdentity(data_dir, { broker, joinToken, joinTokenFile, name, tags });
      // A join token contains the fingerprint of its broker's CA certificate.
      if (joinToken && !joinToken.includes(identity.fingerprint))
        log.warn(
          { data_dir },
          'the join token is ignored: this machine has joined another broker; to join the token’s broker, use another --data-dir',
        );
      if (file)
        await rm(file, { force: true }).catch((error: unknown) =>
          log.warn(
            { reason: reasonOf(error) },
            'the file of the join token could not be removed; remove it by hand, unless it is meant to be read-only',
          ),
        );
      return identity;
    } catch (error) {
      if (!(error instanceof AppError)) throw error;
      waits();
      const ms = wait.next();
      log.warn(
        { reason: error.message, retry_ms: Math.round(ms) },
        'this machine could not join the broker; the agent tries again',
      );
      await sleep(ms, signal);
    }
  }
}

function warnOfLocks({ allow, root }: AgentSettings, log: Logger): void {
  const shell = allow.includes('exec') || allow.includes('terminal');
  const lock = root.join() !== '/' || !allow.includes('files:read') || !allow.includes('files:write');
  if (shell && lock) {
    log.warn(
      "--root and the files capabilities have no effect, because exec or terminal is allowed and a shell can use every file of the agent's user. To limit file access, remove exec and terminal from --allow",
    );
  }
  const everywhere = process.getuid?.() === 0 && root.includes('/') && allow.includes('files:write');
  if (everywhere && !shell) {
    log.warn(
      'this agent runs as root and may write every file, so a request can run any command by writing it to a file in /etc/cron.d. Set --root, or run the agent as another user',
    );
  }
}

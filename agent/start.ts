// Wires an agent together and takes it apart again.
import { chmod, mkdir } from 'node:fs/promises';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { backoff } from '../shared/backoff.ts';
import { sleep } from '../shared/clock.ts';
import { AppError } from '../shared/errors.ts';
import { lockDirectory } from '../shared/lock.ts';
import type { Logger } from '../shared/logger.ts';
import type { AgentMethods } from '../shared/rpc.ts';
import { type Activity, openActivity } from './activity/index.ts';
import { belongingsOf } from './belongings.ts';
import type { AgentSettings } from './config.ts';
import { openFiles } from './files/index.ts';
import { type Identity, openIdentity } from './identity.ts';
import { keepLinked } from './link/index.ts';
import { openMetrics } from './metrics.ts';
import { openProcesses, type Processes } from './processes/index.ts';

export interface Agent {
  machineId: string;
  /** Settles when the agent has ended: resolved after close(), rejected with StartError when the broker removed it. */
  ended: Promise<void>;
  /** Says farewell, ends what runs, gives the directory back. */
  close(): Promise<void>;
}

/** Starts an agent: enrols if need be, then stays linked until closed. Throws StartError. */
export async function startAgent(
  settings: AgentSettings,
  log: Logger,
  changed?: (linked: boolean) => void,
): Promise<Agent> {
  const directory = settings.data_dir;
  await mkdir(directory, { recursive: true, mode: 0o700 });
  await chmod(directory, 0o700);
  warnOfShell(settings, log);
  const unlock = lockDirectory(directory, 'agent');
  const stopping = new AbortController();
  const identity = await enrolled(settings, log, stopping.signal).catch((error: unknown) => {
    unlock();
    throw error;
  });
  warnOfToken(settings, identity, log);
  const processes = await openProcesses({
    directory: join(directory, 'processes'),
    log,
    mayRunAs: settings.allow.includes('user'),
  });
  const { secret, program } = belongingsOf(settings);
  const files = await openFiles({
    roots: settings.root,
    home: homedir(),
    forbidden: secret,
    fixed: program,
    processes: () => [process.pid, ...processes.pids()],
    directory,
    log,
  });
  const metrics = openMetrics();
  const activity = await openActivity(directory, log);
  const handlers: AgentMethods = {
    ...files,
    ...processes,
    getMetrics: async () => ({ metrics: await metrics.report() }),
  };
  const linked = keepLinked(
    {
      broker: settings.broker,
      identity,
      handlers,
      capabilities: settings.allow,
      roots: settings.root,
      missing: processes.missing,
      journalId: processes.journalId,
      processIds: () => processes.ids(),
      report: async () => (settings.allow.includes('metrics') ? metrics.report() : null),
      log,
      activity,
      ...(changed && { changed }),
    },
    stopping.signal,
  );
  const ended = finishing(linked, processes, activity, unlock);
  // Whoever holds the agent may look at `ended` late.
  ended.catch(() => undefined);
  return {
    machineId: identity.machineId,
    ended,
    async close() {
      stopping.abort();
      await ended.catch(() => undefined);
    },
  };
}

async function finishing(
  linked: Promise<void>,
  processes: Processes,
  activity: Activity,
  unlock: () => void,
): Promise<void> {
  try {
    await linked;
  } finally {
    await processes.stop();
    await activity.close();
    unlock();
  }
}

/** A machine that has joined keeps its broker. */
function warnOfToken({ join_token, data_dir }: AgentSettings, { fingerprint }: Identity, log: Logger): void {
  // It names the authority that it pins.
  if (!join_token || join_token.includes(fingerprint)) return;
  log.warn({ data_dir }, 'this machine has joined another broker before: the join token is not used');
}

/** Enrolment waits for a broker that cannot be reached yet, as the link itself does. */
async function enrolled(settings: AgentSettings, log: Logger, signal: AbortSignal): Promise<Identity> {
  const { broker, join_token: joinToken, name, tags } = settings;
  const wait = backoff();
  for (;;) {
    try {
      return await openIdentity(settings.data_dir, { broker, joinToken, name, tags });
    } catch (error) {
      if (!(error instanceof AppError)) throw error;
      const ms = wait.next();
      log.warn({ err: error, retry_ms: Math.round(ms) }, 'cannot join yet; trying again');
      await sleep(ms, signal);
    }
  }
}

function warnOfShell({ allow, root }: AgentSettings, log: Logger): void {
  const shell = allow.includes('exec') || allow.includes('terminal');
  const lock = root.join() !== '/' || !allow.includes('files:read') || !allow.includes('files:write');
  if (shell && lock) {
    log.warn(
      'exec or terminal is allowed: a shell is this user, so the locks on files hold nobody back who may use it',
    );
  }
}

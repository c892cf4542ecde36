// Reports to systemd that this program is ready, alive or stopping (sd_notify(3)).
import { execFile } from 'node:child_process';
import { promisify } from 'node:util';
import { every } from '../clock.ts';
import type { Logger } from '../logger.ts';
import { version } from '../version.ts';

export type Notify = ReturnType<typeof createNotify>;

type Environment = Record<string, string | undefined>;

const notifyMs = 10_000;

/**
 * Removes systemd's variables from `env`, and returns the methods that report to systemd. Without NOTIFY_SOCKET these
 * methods do nothing.
 */
export function createNotify(env: Environment, pid: number, log: Logger) {
  const socket = take(env, 'NOTIFY_SOCKET');
  const watchdogMs = Number(take(env, 'WATCHDOG_USEC') ?? 0) / 1_000;
  const watched = [undefined, String(pid)].includes(take(env, 'WATCHDOG_PID'));
  let sent = Promise.resolve();
  let beats: (() => void) | undefined;
  let over = false;
  const notify = (...words: string[]): Promise<void> => {
    // Messages are sent one after another, so that the last text is the final status.
    if (socket)
      sent = sent
        .then(() => send(socket, words))
        .catch((error: unknown) =>
          log.warn({ err: error }, 'systemd-notify failed, so systemctl status may be outdated'),
        );
    return sent;
  };
  return {
    /**
     * Reports that the program is ready, with `text` as its status. Later calls only change the text. Also feeds
     * systemd's watchdog while `alive` returns true.
     */
    up(text: string, alive: () => boolean | Promise<boolean>): void {
      if (over) return;
      // The status includes the version of the running program, because its file may have been updated since its start.
      void notify('READY=1', `STATUS=${line(text)} (${version})`);
      if (!watched || !(watchdogMs > 0)) return;
      // systemd ends the program if it receives no WATCHDOG=1 for `watchdogMs`.
      const beat = async (): Promise<void> => {
        if (await alive()) await notify('WATCHDOG=1');
      };
      beats ??= every(watchdogMs / 2, () => void beat());
    },
    /** Reports that the program stops, with `text` as the reason. Resolves when the report is sent. */
    ending(text: string): Promise<void> {
      over = true;
      beats?.();
      return notify('STOPPING=1', `STATUS=${line(text)}`);
    },
  };
}

function take(env: Environment, name: string): string | undefined {
  const value = env[name];
  delete env[name];
  return value;
}

const line = (text: string): string => text.replace(/\s+/g, ' ');

/** Runs `systemd-notify`, because Node cannot send datagrams to a Unix socket. Each run takes 8 ms. */
async function send(socket: string, words: string[]): Promise<void> {
  const options = { env: { PATH: '/usr/bin:/bin', NOTIFY_SOCKET: socket }, timeout: notifyMs };
  await promisify(execFile)('systemd-notify', words, options);
}

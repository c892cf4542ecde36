// Notifies systemd of a program that it started: that it is up, its status, and that it is alive (sd_notify(3)).
import { execFile } from 'node:child_process';
import { every } from './clock.ts';
import type { Logger } from './logger.ts';
import { version } from './version.ts';

export interface Notify {
  /** It is up, and `text` says how; the manager ends it once `alive` is no longer true. Later calls only send the text. */
  up(text: string, alive: () => boolean): void;
  /** It is about to end, and why; resolves when that is sent. */
  ending(text: string): Promise<void>;
}

type Environment = Record<string, string | undefined>;

const notifyMs = 10_000;

/** Takes what systemd has left in the environment out of it. Without a systemd all this does nothing. */
export function openNotify(env: Environment, pid: number, log: Logger): Notify {
  const socket = take(env, 'NOTIFY_SOCKET');
  const watchdogMs = Number(take(env, 'WATCHDOG_USEC') ?? 0) / 1_000;
  const watched = [undefined, String(pid)].includes(take(env, 'WATCHDOG_PID'));
  let sent = Promise.resolve();
  let beats: (() => void) | undefined;
  let over = false;
  const notify = (...words: string[]): Promise<void> => {
    // One after another, so that the last text is the one that stays.
    if (socket)
      sent = sent
        .then(() => send(socket, words))
        .catch((error: unknown) => log.warn({ err: error }, 'systemd could not be notified'));
    return sent;
  };
  return {
    up(text, alive) {
      if (over) return;
      // Which version runs: the file it was started from may hold a newer one by now.
      void notify('READY=1', `STATUS=${line(text)} (${version})`);
      if (!watched || !(watchdogMs > 0)) return;
      beats ??= every(watchdogMs / 2, () => {
        if (alive()) void notify('WATCHDOG=1');
      });
    },
    ending(text) {
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

/** The socket takes datagrams, which Node cannot send to a path: 8 ms of a program that every systemd brings along. */
function send(socket: string, words: string[]): Promise<void> {
  const options = { env: { PATH: '/usr/bin:/bin', NOTIFY_SOCKET: socket }, timeout: notifyMs };
  return new Promise((resolve, reject) => {
    execFile('systemd-notify', words, options, (error) => (error ? reject(error) : resolve()));
  });
}

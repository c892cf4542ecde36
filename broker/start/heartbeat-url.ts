// Calls a URL while this broker is alive, so that a monitoring service elsewhere notices when the broker fails.
import { every } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import { version } from '../../shared/version.ts';
import type { Sender } from '../deliveries/attempt-delivery.ts';

interface HeartbeatParts {
  sender: Sender;
  /** True if the broker serves requests and its history answers. */
  alive(): Promise<boolean>;
  log: Logger;
}

/**
 * Calls the URL at once, then every `ms` milliseconds, but only while the broker is alive. The returned function stops
 * the calls.
 */
export function reportAlive(url: string, ms: number, { sender, alive, log }: HeartbeatParts): () => void {
  const ending = new AbortController();
  let failing = false;
  const report = async (): Promise<void> => {
    if (!(await alive())) return;
    const request = { method: 'GET', headers: { 'User-Agent': `Farhand/${version}` } } as const;
    const { delivered, aborted, status_code, error } = await sender.send(url, () => request, ending.signal);
    if (aborted || delivered === !failing) return;
    failing = !delivered;
    // Only the origin is logged, because the path of such a URL is often a secret.
    const what = { origin: new URL(url).origin, status_code, reason: error };
    if (failing) log.warn(what, '--heartbeat-url cannot be reached, or answers with an error; trying again');
    else log.info(what, '--heartbeat-url answers again');
  };
  // Neither alive() nor send() rejects.
  void report();
  const stop = every(ms, () => void report());
  return () => {
    stop();
    ending.abort();
  };
}

// Sends the heartbeats of all links when they are due, and finds silent machines. A single timer does both.
import { every, monotonic } from '../../shared/clock.ts';
import type { LinkSettings } from './link-times-and-limits.ts';

/** A link that gets heartbeats. Its methods must not throw. */
interface Beating {
  /** Time when the last message of the machine arrived, in milliseconds of `monotonic`. */
  readonly heardAt: number;
  /**
   * Undefined if no message waits to be written. Otherwise the time when messages began to wait, in milliseconds of
   * `monotonic`. While messages wait, each message that is written sets it to the present time. probe() does the same.
   */
  readonly unwrittenSince: number | undefined;
  /** Called every heartbeat interval. */
  beat(): void;
  /** Called when messages have waited for a second. Closes the connection if it is broken. */
  probe(): void;
  /** Called when the link has been silent for too long. The link then removes itself. */
  silent(): void;
}

/**
 * Milliseconds between checks. Each check sends the heartbeats that have become due since the last check. With 10,000
 * links, a check once per second would block the event loop for 30 ms.
 */
const checkMs = 250;

/** If messages wait for this many milliseconds to be written, the connection may be broken. */
const unwrittenMs = 1_000;

export class Heartbeats {
  readonly #settings: LinkSettings;
  /** Time when each link gets its next heartbeat. */
  readonly #dueAt = new Map<Beating, number>();
  #stop: (() => void) | undefined;

  constructor(settings: LinkSettings) {
    this.#settings = settings;
  }

  /** Starts the heartbeats of a link. The first one is due after an interval. */
  add(link: Beating): void {
    const { heartbeatMs, silenceMs } = this.#settings;
    this.#dueAt.set(link, monotonic() + heartbeatMs);
    this.#stop ??= every(Math.min(checkMs, heartbeatMs / 4, silenceMs / 4), () => this.#check());
  }

  delete(link: Beating): void {
    this.#dueAt.delete(link);
    if (this.#dueAt.size > 0) return;
    this.#stop?.();
    this.#stop = undefined;
  }

  #check(): void {
    const { heartbeatMs, silenceMs } = this.#settings;
    const now = monotonic();
    for (const [link, dueAt] of this.#dueAt) {
      if (now - (link.unwrittenSince ?? now) >= unwrittenMs) link.probe();
      if (now - link.heardAt >= silenceMs) link.silent();
      else if (now >= dueAt) {
        // If the whole process was delayed, a single heartbeat is sent for the missed ones.
        this.#dueAt.set(link, Math.max(dueAt + heartbeatMs, now));
        link.beat();
      }
    }
  }
}

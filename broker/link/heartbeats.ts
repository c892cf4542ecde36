// Heartbeats of all links: one timer sends those that are due, spread over the interval, and finds silent machines.
import { every, monotonic } from '../../shared/clock.ts';

/** A link that gets heartbeats. Its methods must not throw. */
interface Beating {
  /** When its last message arrived, in milliseconds of `monotonic`. */
  readonly heardAt: number;
  /** Called every heartbeat interval. */
  beat(): void;
  /** Called once the link has been silent for too long. It removes itself. */
  silent(): void;
}

export interface HeartbeatSettings {
  heartbeatMs: number;
  silenceMs: number;
}

/**
 * Milliseconds between two looks at all links. Silence is noticed at most this late. With a second, the
 * heartbeats of 10,000 links would keep the event loop busy for 30 ms at a time.
 */
const lookMs = 250;

export class Heartbeats {
  readonly #settings: HeartbeatSettings;
  /** When each link gets its next heartbeat. */
  readonly #dueAt = new Map<Beating, number>();
  #stop: (() => void) | undefined;

  constructor(settings: HeartbeatSettings) {
    this.#settings = settings;
  }

  /** Starts the heartbeats of a link. The first one is due after an interval. */
  add(link: Beating): void {
    const { heartbeatMs, silenceMs } = this.#settings;
    this.#dueAt.set(link, monotonic() + heartbeatMs);
    this.#stop ??= every(Math.min(lookMs, heartbeatMs / 4, silenceMs / 4), () => this.#look());
  }

  delete(link: Beating): void {
    this.#dueAt.delete(link);
    if (this.#dueAt.size > 0) return;
    this.#stop?.();
    this.#stop = undefined;
  }

  #look(): void {
    const { heartbeatMs, silenceMs } = this.#settings;
    const now = monotonic();
    for (const [link, dueAt] of this.#dueAt) {
      if (now - link.heardAt >= silenceMs) link.silent();
      else if (now >= dueAt) {
        // After a delay of the whole process one heartbeat is enough.
        this.#dueAt.set(link, Math.max(dueAt + heartbeatMs, now));
        link.beat();
      }
    }
  }
}

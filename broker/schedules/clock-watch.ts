// Compares this machine's wall clock with its monotonic one, and so notices that the wall clock was set forward or back.
import { monotonic, now } from '../../shared/clock.ts';
import { believedMs, type Leap } from './catch-up.ts';

/** A smaller difference between two looks is no clock that was set: NTP slews both clocks alike. */
const jumpMs = 1_000;

export class ClockWatch {
  /** When the broker started, by the clock as it is set now. */
  started = now();
  /** What the clock was last set forward over, and stayed ahead of for a minute. */
  leap: Leap | undefined;
  #looked = now();
  #skew = now() - monotonic();
  /** Not a minute old; `ahead`: of the clock before it, in ms. */
  #young: (Leap & { ahead: number; since: number }) | undefined;

  /** Whether the clock leapt forward less than a minute ago: it may be set back at once, so nothing is decided by it. */
  get holds(): boolean {
    return this.#young !== undefined;
  }

  /** How far the clock was set since the last look (0: it was not), and what the corrected one showed at that look. */
  look(): { drift: number; corrected: number } {
    const drift = now() - monotonic() - this.#skew;
    const from = this.#looked;
    this.#skew += drift;
    this.#looked = now();
    if (Math.abs(drift) < jumpMs) {
      this.#settle();
      return { drift: 0, corrected: from };
    }
    const corrected = from + drift;
    this.started += drift;
    const ahead = (this.#young?.ahead ?? 0) + drift;
    const isAhead = ahead >= jumpMs;
    this.#young = isAhead
      ? { from: this.#young?.from ?? from, to: corrected, ahead, since: monotonic() }
      : undefined;
    if (this.leap) this.leap = { ...this.leap, to: Math.min(this.leap.to, corrected) };
    return { drift, corrected };
  }

  #settle(): void {
    if (!this.#young || monotonic() - this.#young.since < believedMs) return;
    const { from, to } = this.#young;
    this.leap = { from, to };
    this.#young = undefined;
  }
}

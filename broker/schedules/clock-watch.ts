// Detects changes of the wall clock by comparing it with the monotonic clock.
import { monotonic, now } from '../../shared/clock.ts';
import { type ClockJump, lastingMs } from './decide-next-run.ts';

/**
 * The smallest difference between the two clocks, in milliseconds, that counts as a change. Corrections by NTP cause no
 * difference, because NTP corrects the speed of both clocks.
 */
const jumpMs = 1_000;

interface ClockChange {
  /**
   * Milliseconds by which the wall clock was set forward since the last comparison; negative if it was set back, 0 if
   * it was not set.
   */
  drift: number;
  /**
   * Time of the last comparison, corrected by `drift`: if the clock was set forward by an hour since then, this time is
   * one hour later too.
   */
  corrected: number;
}

export class ClockWatch {
  /** Time of the broker's start, corrected for all changes of the clock since then. */
  started = now();
  /** The last jump forward that was not undone within a minute. */
  jump: ClockJump | undefined;
  #comparedAt = now();
  #skew = now() - monotonic();
  /**
   * A jump forward less than a minute ago. `ahead` is the number of milliseconds by which the clock was set forward,
   * and `since` the monotonic time of the jump.
   */
  #recent: (ClockJump & { ahead: number; since: number }) | undefined;

  /**
   * True if the clock jumped forward less than a minute ago. No schedule may run then, because the clock may be set
   * back.
   */
  get isUncertain(): boolean {
    return this.#recent !== undefined;
  }

  compare(): ClockChange {
    // PostgreSQL refuses fractions in the times of the history, and monotonic() has fractions.
    const drift = Math.round(now() - monotonic() - this.#skew);
    const from = this.#comparedAt;
    this.#skew += drift;
    this.#comparedAt = now();
    if (Math.abs(drift) < jumpMs) {
      this.#settle();
      return { drift: 0, corrected: from };
    }
    const corrected = from + drift;
    this.started += drift;
    const ahead = (this.#recent?.ahead ?? 0) + drift;
    const isAhead = ahead >= jumpMs;
    this.#recent = isAhead
      ? { from: this.#recent?.from ?? from, to: corrected, ahead, since: monotonic() }
      : undefined;
    if (this.jump) this.jump = { ...this.jump, to: Math.min(this.jump.to, corrected) };
    return { drift, corrected };
  }

  #settle(): void {
    if (!this.#recent || monotonic() - this.#recent.since < lastingMs) return;
    const { from, to } = this.#recent;
    this.jump = { from, to };
    this.#recent = undefined;
  }
}

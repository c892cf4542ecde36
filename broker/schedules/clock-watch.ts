// Detects that the wall clock of this machine was set, by comparing it with the monotonic clock.
import { monotonic, now } from '../../shared/clock.ts';
import { believedMs, type ClockJump } from './catch-up.ts';

/** The wall clock was set if the clocks differ by this or more between two looks: NTP slews both alike. */
const jumpMs = 1_000;

export class ClockWatch {
  /** When the broker started, by the clock as it is set now. */
  started = now();
  /** The last jump forward that lasted a minute. */
  jump: ClockJump | undefined;
  #looked = now();
  #skew = now() - monotonic();
  /** A jump forward less than a minute ago; `ahead`: how far it is ahead of the clock before, in ms. */
  #recent: (ClockJump & { ahead: number; since: number }) | undefined;

  /** Whether the clock jumped forward less than a minute ago: it may be set back at once, so nothing may run by it. */
  get isUncertain(): boolean {
    return this.#recent !== undefined;
  }

  /**
   * `drift`: milliseconds by which the clock was set since the last look, 0 if it was not. `corrected`: what the clock
   * would have read at that look.
   */
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
    const ahead = (this.#recent?.ahead ?? 0) + drift;
    const isAhead = ahead >= jumpMs;
    this.#recent = isAhead
      ? { from: this.#recent?.from ?? from, to: corrected, ahead, since: monotonic() }
      : undefined;
    if (this.jump) this.jump = { ...this.jump, to: Math.min(this.jump.to, corrected) };
    return { drift, corrected };
  }

  #settle(): void {
    if (!this.#recent || monotonic() - this.#recent.since < believedMs) return;
    const { from, to } = this.#recent;
    this.jump = { from, to };
    this.#recent = undefined;
  }
}

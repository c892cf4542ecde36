// CPU and memory of every machine in each minute of the last hour. A minute needs two bytes.
import { monotonic } from '../../shared/clock.ts';

const minutes = 60;
const minuteMs = 60_000;
/** The value of a minute without a report. All other values are percentages. */
const none = 255;

export class LastHour {
  /** A ring for each machine: one byte for the CPU in each minute, then one byte for the memory in each minute. */
  readonly #rings = new Map<string, Uint8Array>();
  #minute = minuteNow();

  /** Records a report. The last report of a minute counts. Both values are percentages. */
  add(machineId: string, cpu: number, memory: number): void {
    this.#advance();
    const ring = this.#ringOf(machineId);
    const at = this.#minute % minutes;
    ring[at] = Math.round(cpu);
    ring[at + minutes] = Math.round(memory);
  }

  /**
   * Fills minutes of the last hour with a stored sample, which was recorded `agoMs` milliseconds ago. The sample counts
   * for the `spanMs` milliseconds before it was recorded. Minutes that already have a value are not changed.
   */
  fill(machineId: string, agoMs: number, spanMs: number, cpu: number, memory: number): void {
    this.#advance();
    const ring = this.#ringOf(machineId);
    const last = Math.floor(agoMs / minuteMs);
    const first = Math.min(minutes, last + Math.max(1, Math.round(spanMs / minuteMs)));
    for (let ago = Math.max(0, last); ago < first; ago += 1) {
      const at = (this.#minute - ago + minutes) % minutes;
      if (ring[at] !== none) continue;
      ring[at] = Math.round(cpu);
      ring[at + minutes] = Math.round(memory);
    }
  }

  /** Returns a value for each minute, oldest first; null for a minute without a report. */
  of(machineId: string | undefined): { cpu: (number | null)[]; memory: (number | null)[] } {
    this.#advance();
    const ring = machineId === undefined ? undefined : this.#rings.get(machineId);
    const values = (from: number): (number | null)[] =>
      Array.from({ length: minutes }, (_, n) => {
        const value = ring?.[from + ((this.#minute + 1 + n) % minutes)] ?? none;
        return value === none ? null : value;
      });
    return { cpu: values(0), memory: values(minutes) };
  }

  remove(machineId: string): void {
    this.#rings.delete(machineId);
  }

  #ringOf(machineId: string): Uint8Array {
    const ring = this.#rings.get(machineId) ?? new Uint8Array(2 * minutes).fill(none);
    this.#rings.set(machineId, ring);
    return ring;
  }

  /**
   * Clears the slots of the minutes that have begun since the last call. These slots still have the values of one
   * hour ago.
   */
  #advance(): void {
    const now = minuteNow();
    const begun = Math.min(now - this.#minute, minutes);
    this.#minute = now;
    for (let n = 0; n < begun; n += 1) {
      const at = (now - n) % minutes;
      for (const ring of this.#rings.values()) ring[at] = ring[at + minutes] = none;
    }
  }
}

function minuteNow(): number {
  return Math.floor(monotonic() / minuteMs);
}

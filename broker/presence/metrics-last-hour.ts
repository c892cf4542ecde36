// CPU and memory of every machine in each minute of the last hour. A minute needs two bytes, so 10,000
// machines need 1.2 MB.
import { monotonic } from '../../shared/clock.ts';

const minutes = 60;
const minuteMs = 60_000;
/** Bytes per machine: a ring with two bytes for each minute, one for CPU and one for memory. */
const bytes = 2 * minutes;
/** The value of a minute without a report. All other values are percentages. */
const none = 255;

export class LastHour {
  /** The number of each machine's row. `#values` consists of rows of `bytes` bytes. */
  readonly #rows = new Map<string, number>();
  /** Numbers of the rows that removed machines have left free. */
  readonly #free: number[] = [];
  #values = new Uint8Array(0);
  #minute = minuteNow();

  /** Records a report. The last report of a minute counts. Both values are percentages. */
  add(machineId: string, cpu: number, memory: number): void {
    this.#advance();
    const at = this.#rowOf(machineId) * bytes + (this.#minute % minutes);
    this.#values[at] = Math.round(cpu);
    this.#values[at + minutes] = Math.round(memory);
  }

  /**
   * Adds a stored sample, which stands for the `spanMs` milliseconds before it. Minutes that already have a
   * value are not changed.
   */
  fill(machineId: string, agoMs: number, spanMs: number, cpu: number, memory: number): void {
    this.#advance();
    const start = this.#rowOf(machineId) * bytes;
    const last = Math.floor(agoMs / minuteMs);
    const first = Math.min(minutes, last + Math.max(1, Math.round(spanMs / minuteMs)));
    for (let ago = Math.max(0, last); ago < first; ago += 1) {
      const at = start + ((this.#minute - ago + minutes) % minutes);
      if (this.#values[at] !== none) continue;
      this.#values[at] = Math.round(cpu);
      this.#values[at + minutes] = Math.round(memory);
    }
  }

  /** Returns a value for each minute, oldest first; null for a minute without a report. */
  of(machineId: string | undefined): { cpu: (number | null)[]; memory: (number | null)[] } {
    this.#advance();
    const row = machineId === undefined ? undefined : this.#rows.get(machineId);
    const ring = (from: number): (number | null)[] =>
      Array.from({ length: minutes }, (_, n) => {
        const value = row === undefined ? none : this.#values[from + ((this.#minute + 1 + n) % minutes)];
        return value === undefined || value === none ? null : value;
      });
    const start = (row ?? 0) * bytes;
    return { cpu: ring(start), memory: ring(start + minutes) };
  }

  /** Removes a machine. Its bytes are reused for the next new machine. */
  remove(machineId: string): void {
    const row = this.#rows.get(machineId);
    if (row === undefined) return;
    this.#rows.delete(machineId);
    this.#values.fill(none, row * bytes, (row + 1) * bytes);
    this.#free.push(row);
  }

  #rowOf(machineId: string): number {
    const known = this.#rows.get(machineId);
    if (known !== undefined) return known;
    const row = this.#free.pop() ?? this.#rows.size;
    this.#rows.set(machineId, row);
    if ((row + 1) * bytes > this.#values.length) {
      const larger = new Uint8Array(Math.max(16 * bytes, 2 * this.#values.length)).fill(none);
      larger.set(this.#values);
      this.#values = larger;
    }
    return row;
  }

  /**
   * Clears the slots of the minutes that have begun since the last call. These slots still have the values of one
   * hour ago.
   */
  #advance(): void {
    const now = minuteNow();
    const begun = Math.min(now - this.#minute, minutes);
    this.#minute = now;
    for (let n = 0; n < begun; n += 1)
      for (let at = (now - n) % minutes; at < this.#values.length; at += minutes) this.#values[at] = none;
  }
}

function minuteNow(): number {
  return Math.floor(monotonic() / minuteMs);
}

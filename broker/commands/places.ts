// All commands that have not ended, in the order they came, and those of each machine.
import { type Run, waits } from './run.ts';

export class Places {
  readonly #runs = new Map<string, Run>();
  readonly #byMachine = new Map<string, Set<Run>>();

  add(run: Run): void {
    const { id, machine_id } = run.command;
    this.#runs.set(id, run);
    const there = this.#byMachine.get(machine_id) ?? new Set();
    this.#byMachine.set(machine_id, there.add(run));
  }

  delete(run: Run): void {
    const { id, machine_id } = run.command;
    this.#runs.delete(id);
    const there = this.#byMachine.get(machine_id);
    there?.delete(run);
    if (there?.size === 0) this.#byMachine.delete(machine_id);
  }

  get(id: string): Run | undefined {
    return this.#runs.get(id);
  }

  all(): Iterable<Run> {
    return this.#runs.values();
  }

  /** Those that the agent of a machine has or is about to have. */
  given(machineId: string): Run[] {
    return this.#on(machineId).filter((run) => !waits(run));
  }

  /** Those that no agent has yet. */
  waiting(machineId: string): Run[] {
    return this.#on(machineId).filter(waits);
  }

  #on(machineId: string): Run[] {
    return [...(this.#byMachine.get(machineId) ?? [])];
  }
}

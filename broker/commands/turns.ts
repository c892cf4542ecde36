// Whose turn it is in a batch: so many at once, and none any more after too many failures.
import type { BatchId } from '../../shared/api/route.ts';

/** What a batch allows, and how far it has come. */
export interface Turn {
  concurrency: number | null;
  max_failures: number | null;
  /** Members that have not ended. */
  open: number;
  /** Members that an agent has. */
  running: number;
  /** Members that ended otherwise than completed. */
  failures: number;
}

export class Turns {
  readonly #turns = new Map<BatchId, Turn>();

  add(batch: BatchId, turn: Turn): void {
    if (turn.open > 0) this.#turns.set(batch, turn);
  }

  remove(batch: BatchId): void {
    this.#turns.delete(batch);
  }

  /** What becomes of the next member of a batch that waits. */
  next(batch: BatchId | null): 'go' | 'wait' | 'never' {
    const turn = batch && this.#turns.get(batch);
    if (!turn) return 'go';
    if (turn.max_failures !== null && turn.failures > turn.max_failures) return 'never';
    return turn.concurrency !== null && turn.running >= turn.concurrency ? 'wait' : 'go';
  }

  began(batch: BatchId | null): void {
    const turn = batch && this.#turns.get(batch);
    if (turn) turn.running += 1;
  }

  /** A member goes back to those that wait. */
  gaveBack(batch: BatchId | null): void {
    const turn = batch && this.#turns.get(batch);
    if (turn) turn.running -= 1;
  }

  /** Whether it was the last one. */
  ended(batch: BatchId | null, { ran, completed }: { ran: boolean; completed: boolean }): boolean {
    const turn = batch && this.#turns.get(batch);
    if (!turn || !batch) return false;
    turn.open -= 1;
    if (ran) turn.running -= 1;
    if (!completed) turn.failures += 1;
    if (turn.open > 0) return false;
    this.#turns.delete(batch);
    return true;
  }
}

// Reads history.db by means of another thread, so that a long query delays no other request.
import { Worker } from 'node:worker_threads';
import { historyReaderProgram } from '../../shared/paths-in-checkout-or-package.ts';
import type { Query, Row } from './database-interface.ts';

/** The thread's answer to one call of read(). The thread answers the calls in their order. */
export type Answer = { rows: Row[][] } | { error: unknown };

export class HistoryReader {
  readonly #file: string;
  /** The calls of read() that the thread has not answered, oldest first. */
  #waiting: PromiseWithResolvers<Row[][]>[] = [];
  /** The thread that reads. The first query starts it. If it has failed, the next query starts another one. */
  #thread: Worker | undefined;
  #closed = false;

  constructor(file: string) {
    this.#file = file;
  }

  /** Runs all queries on one state of the database, which includes every write that has resolved before the call. */
  async read(queries: readonly Query[]): Promise<Row[][]> {
    if (this.#closed) throw new Error('history.db is closed');
    this.#thread ??= this.#start();
    const waiting = Promise.withResolvers<Row[][]>();
    this.#thread.postMessage(queries);
    this.#waiting.push(waiting);
    return waiting.promise;
  }

  /**
   * Waits for the running query, and rejects the waiting calls of read(). No client waits for these calls, because the
   * broker closes its listeners first.
   */
  async close(): Promise<void> {
    this.#closed = true;
    await this.#thread?.terminate();
  }

  #start(): Worker {
    const thread = new Worker(historyReaderProgram, { workerData: this.#file });
    thread.on('message', (answer: Answer) => {
      // A thread that has failed may still send an answer. #fail() has already rejected all calls that waited for it.
      const waiting = this.#thread === thread ? this.#waiting.shift() : undefined;
      if ('rows' in answer) waiting?.resolve(answer.rows);
      else waiting?.reject(answer.error);
    });
    thread.on('error', (error: Error) => this.#fail(thread, error));
    thread.on('exit', () => this.#fail(thread, new Error('the thread that reads history.db has ended')));
    return thread;
  }

  #fail(thread: Worker, error: Error): void {
    if (this.#thread !== thread) return;
    this.#thread = undefined;
    for (const waiting of this.#waiting) waiting.reject(error);
    this.#waiting = [];
  }
}

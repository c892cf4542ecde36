// Stores in the database that a link between this broker and a machine has ended.
import { nextTurn } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { History } from '../history/history-database.ts';
import { arrayOf, unlinking } from './cluster-tables.ts';

export class EndsOfLinks {
  readonly #history: History;
  readonly #brokerId: string;
  readonly #log: Logger;
  /** Ids of ended links, by machine id. An entry stays here until the database has recorded the end of the link. */
  readonly #ended = new Map<string, string>();
  #isPlanned = false;

  constructor(history: History, brokerId: string, log: Logger) {
    this.#history = history;
    this.#brokerId = brokerId;
    this.#log = log;
  }

  /** Records the end of a link soon. Links that end in the same turn of the event loop share one statement. */
  add(machineId: string, linkId: string): void {
    this.#ended.set(machineId, linkId);
    if (!this.#isPlanned) void nextTurn().then(() => this.write());
    this.#isPlanned = true;
  }

  /** Records the ends that the database does not have yet. Never rejects. */
  async write(): Promise<void> {
    this.#isPlanned = false;
    if (this.#ended.size === 0) return;
    const ended = new Map(this.#ended);
    const values = [this.#brokerId, arrayOf([...ended.keys()]), arrayOf([...ended.values()])];
    // Owners are changed under the lock of commits, as in #takeAll() of Cluster, which explains why.
    await this.#history
      .write((transaction) => transaction.run(unlinking, ...values))
      .then(() => {
        for (const [id, link] of ended) if (this.#ended.get(id) === link) this.#ended.delete(id);
      })
      .catch((err: unknown) =>
        this.#log.debug(
          { err },
          'could not store that links of agents have ended; trying again within 2 s, when this broker renews its lease',
        ),
      );
  }
}

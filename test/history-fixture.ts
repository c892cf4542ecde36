// A check that the history must pass on both SQLite and PostgreSQL.
import { expect } from 'vitest';
import type { History, HistoryTransaction } from '../broker/history/history-database.ts';

interface Notes {
  history: History;
  /** Inserts a row with this id. */
  note(transaction: HistoryTransaction, id: string): string;
  /** Ids of the rows that another connection sees. */
  committed(): unknown[] | Promise<unknown[]>;
}

/**
 * Writes three changes. The first two await something other than their transaction, which is not allowed. Expects that
 * both are undone, and that the third is stored.
 */
export async function expectWaitingChangesUndone({ history, note, committed }: Notes): Promise<void> {
  const outcomes = await Promise.allSettled([
    history.write(async (transaction) => {
      note(transaction, 'a');
      await new Promise(() => {});
    }),
    history.write(async (transaction) => {
      note(transaction, 'b');
      // The change waits for the read, but the read starts only after the end of the change. So both would wait
      // forever.
      await history.get('SELECT 1');
    }),
    history.write((transaction) => note(transaction, 'c')),
  ]);
  expect(outcomes.map(({ status }) => status)).toEqual(['rejected', 'rejected', 'fulfilled']);
  expect(outcomes[0]).toMatchObject({
    reason: expect.objectContaining({ message: expect.stringContaining('awaited something other') }),
  });
  expect(await committed()).toEqual(['c']);
}

// Regularly deletes database rows that are no longer needed, such as the rows of stopped brokers and expired tokens.
import { every } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { LeaseConnection } from '../history/postgres-lease-and-notify-connection.ts';
import { claimingRemoved, expiring, pruning } from './cluster-tables.ts';

const pruneMs = 3_600_000;
const expireMs = 60_000;

/**
 * Every minute, deletes expired tokens and the old rows of brokers that were started again, and makes this broker the
 * owner of removed machines whose owner has ended. Every hour, deletes all other outdated rows. What fails is done the
 * next time. Call the returned function to stop.
 */
export function deleteOutdatedRows(connection: LeaseConnection, brokerId: string, log: Logger): () => void {
  let isStopped = false;
  const run = async (statements: readonly string[], values: readonly string[] = []): Promise<void> => {
    try {
      for (const statement of statements) await connection.query(statement, values);
    } catch (err) {
      if (!isStopped)
        log.error(
          { err },
          'outdated rows about brokers and tokens could not be deleted, or removed machines not claimed; trying again later',
        );
    }
  };
  const stops = [
    every(pruneMs, () => void run(pruning)),
    every(expireMs, () => {
      void run(expiring);
      void run([claimingRemoved], [brokerId]);
    }),
  ];
  return () => {
    isStopped = true;
    for (const stop of stops) stop();
  };
}

// How attempts went, written many at a time: each with what comes of it, the last of too many with the webhook's trip.
import type { WebhookId } from '../../shared/api/route.ts';
import { after } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History, HistoryTransaction } from '../history.ts';
import type { State } from '../state/index.ts';
import type { Records, Result } from './records.ts';
import type { Subscriptions } from './subscriptions.ts';

/** A result, and how often its webhook was armed when the attempt began. */
export interface Written extends Result {
  armed: number;
}

export interface Ledger {
  add(result: Written): void;
  /** Writes what it holds. */
  flush(): Promise<void>;
}

/** Nobody waits for these: a trip to the disk holds up everything else. */
const gatherMs = 50;
/** What could not be written (disk full) is tried again after this. */
const rewriteMs = 5_000;

/** `written` is called with what is on disk. */
export function openLedger(
  rooms: { state: State; history: History; events: Events; records: Records; subscriptions: Subscriptions },
  written: (results: readonly Written[]) => void,
  log: Logger,
): Ledger {
  const { state, history, events, records, subscriptions } = rooms;
  let gathered: Written[] = [];
  let cancel: (() => void) | undefined;

  function write(results: readonly Written[], transaction: HistoryTransaction): void {
    const last = new Map<WebhookId, Written>();
    for (const result of results) {
      records.save(result);
      last.set(result.webhookId, result);
    }
    for (const result of last.values()) records.remember(result);
    const failed = results.filter(({ outcome, next }) => !outcome.delivered && next === null);
    for (const result of new Map(failed.map((one) => [one.webhookId, one])).values())
      trip(result, transaction);
  }

  /** Only if nobody has enabled it anew since. */
  function trip({ webhookId, armed, due }: Written, transaction: HistoryTransaction): void {
    const webhook = state.webhooks.get(webhookId);
    if (webhook?.armed !== armed || subscriptions.disabledReason(webhook) !== null) return;
    records.trip(webhookId, armed);
    const reason = 'attempts_failed';
    events.emit(transaction, 'webhook.disabled', undefined, {
      webhook_id: webhookId,
      delivery_id: due.id,
      reason,
    });
    transaction.committed(() => {
      subscriptions.tripped(webhookId, armed);
      log.warn({ webhook_id: webhookId, delivery_id: due.id }, 'webhook disabled: too many attempts failed');
    });
  }

  async function flush(): Promise<void> {
    cancel?.();
    cancel = undefined;
    const results = gathered;
    gathered = [];
    if (results.length === 0) return;
    try {
      await history.write((transaction) => write(results, transaction));
      written(results);
    } catch (error) {
      log.error({ err: error }, 'deliveries of webhooks could not be written');
      gathered = [...results, ...gathered];
      cancel ??= after(rewriteMs, () => void flush());
    }
  }

  return {
    add(result) {
      gathered.push(result);
      cancel ??= after(gatherMs, () => void flush());
    },
    flush,
  };
}

// Verbs and cells that webhooks and alert channels share: both send deliveries to a URL.
import type { Command } from 'commander';
import { StartError } from '../../shared/errors.ts';
import { when } from './print.ts';
import { latest, routeVerb, since } from './verb-from-route.ts';

interface Receiver {
  enabled: boolean;
  disabled_reason: string | null;
  last_delivery: { delivered: boolean } | null;
}

export const receiverCells = {
  enabled: ({ enabled, disabled_reason }: Receiver) => (enabled ? 'yes' : (disabled_reason ?? 'no')),
  last: ({ last_delivery }: Receiver) => last_delivery && (last_delivery.delivered ? 'delivered' : 'failed'),
};

/**
 * Adds the verbs `test` and `deliveries`. `what`: noun for what `test` sends. `test`: help text of that verb. `fields`:
 * columns of the deliveries.
 */
export function addDeliveries(
  parent: Command,
  noun: 'webhooks' | 'alertChannels',
  { what, test, fields }: { what: string; test: string; fields: string },
): void {
  routeVerb(parent, 'test', noun, 'test', {
    about: test,
    after({ delivered }) {
      if (!delivered) throw new StartError(`the ${what} was not delivered; the error above says why`, 1);
    },
  });
  routeVerb(parent, 'deliveries', noun, 'deliveries', {
    examples: ['--status failed'],
    flags: { '--status <pending|delivered|failed>': 'only deliveries with this status', ...since, ...latest },
    view: {
      fields,
      cells: {
        attempts: ({ attempts }) => attempts.length,
        next: ({ next_attempt_at }) => when(next_attempt_at),
        last: ({ attempts }) => attempts.at(-1)?.error ?? attempts.at(-1)?.status_code,
      },
    },
  });
}

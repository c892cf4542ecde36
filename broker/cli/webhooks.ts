// The verbs of farhand webhooks: manage URLs that receive events, and list the deliveries to them.
import type { Command } from 'commander';
import { UsageError } from '../../shared/errors.ts';
import { verb } from './declare-verb.ts';
import { readInput } from './prompt.ts';
import { addDeliveries, receiverCells } from './shared-delivery-verbs.ts';
import { enabledOf, printView, routeVerb } from './verb-from-route.ts';

/**
 * Flags of both create and update. There is no flag for the secret, because other users can read command
 * lines.
 */
const flags = {
  '--events <list>': 'event types, or families such as machine.* (default: *, for all)',
  '--machine <list>': 'only events of these machines, comma-separated',
  '--secret-stdin': 'read the secret from standard input; deliveries are signed with it',
};

export function addWebhooks(program: Command): void {
  const webhooks = program.command('webhooks').description('manage webhooks, which send events to URLs');
  routeVerb(webhooks, 'list', 'webhooks', 'list', {
    view: {
      fields: 'id url events enabled last',
      cells: receiverCells,
    },
  });
  routeVerb(webhooks, 'get', 'webhooks', 'get');
  routeVerb(webhooks, 'create <url>', 'webhooks', 'create', {
    about: 'send events to a URL',
    examples: ['https://example.org/hook --events "machine.*,command.failed" --secret-stdin < secret'],
    flags,
    defaults: { events: ['*'] },
    input: secretOf,
  });
  routeVerb(webhooks, 'update', 'webhooks', 'update', {
    about: 'change the settings that are given as flags; --enable also resets the count of failures',
    examples: ['--events "machine.*" --enable'],
    flags: {
      ...flags,
      '--url <url>': 'URL to send the events to',
      '--enable': 'resume deliveries',
      '--disable': 'stop deliveries',
    },
    input: async (options) => ({ ...enabledOf(options), ...(await secretOf(options)) }),
  });
  routeVerb(webhooks, 'delete', 'webhooks', 'remove', { destroys: ['remove the webhook', 'removed'] });
  addDeliveries(webhooks, 'webhooks', {
    what: 'test event',
    test: 'send a test event now, and fail if the URL does not accept it',
    fields: 'id type status attempts made=created_at next last',
  });
  addRedeliver(webhooks);
}

function addRedeliver(webhooks: Command): void {
  const redeliver = {
    about: 'repeat one delivery, or with --since send all events that were not delivered',
    examples: ['farhand webhooks redeliver hook_… --since 6h'],
    flags: {
      '--since <time>': 'send the undelivered events since this time: a date, or 6h for 6 hours ago',
    },
  } as const;
  verb(
    webhooks,
    'redeliver <webhook> [delivery]',
    redeliver,
    async (client, webhook_id, delivery_id, options) => {
      const { since, output } = options;
      if ((delivery_id === undefined) === (since === undefined))
        throw new UsageError('choose either the id of a delivery or --since TIME');
      if (delivery_id === undefined) {
        const answer = await client.webhooks.redeliverSince({ webhook_id, since: since ?? '' });
        return printView(client, output, answer, { fields: 'redelivered' });
      }
      const { id, status } = await client.webhooks.redeliver({ webhook_id, delivery_id });
      await printView(client, output, { id, status });
    },
  );
}

async function secretOf({ secretStdin }: Record<string, unknown>): Promise<{ secret?: string }> {
  if (!secretStdin) return {};
  return { secret: (await readInput(4096, 'a secret is at most 4 KiB of text')).replace(/\r?\n$/, '') };
}

// The verbs of farhand webhooks: manage the URLs that receive events, and list the deliveries to these URLs.
import type { Command } from 'commander';
import { StartError, UsageError } from '../../shared/errors.ts';
import { when } from './print.ts';
import { readInput } from './prompt.ts';
import { latest, printView, routeVerb, since } from './route-verb.ts';
import { verb } from './verb.ts';

/** Flags of both create and update. The secret is read from stdin, because other users can list arguments. */
const flags = {
  '--events <list>': 'event types and families such as machine.* (default: *)',
  '--machine <list>': 'only events of these machines',
  '--secret-stdin': 'read the secret that signs deliveries from standard input',
};

export function addWebhooks(program: Command): void {
  const webhooks = program.command('webhooks').description('send events to URLs');
  routeVerb(webhooks, 'list', 'webhooks', 'list', {
    view: {
      fields: 'id url events enabled last',
      cells: {
        enabled: ({ enabled, disabled_reason }) => (enabled ? 'yes' : (disabled_reason ?? 'no')),
        last: ({ last_delivery }) => last_delivery && (last_delivery.delivered ? 'delivered' : 'failed'),
      },
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
    about: 'change what the flags name; --enable also clears its failures',
    examples: ['--events "machine.*" --enable'],
    flags: {
      ...flags,
      '--url <url>': 'where to send them',
      '--enable': 'resume deliveries',
      '--disable': 'stop deliveries',
    },
    async input({ enable, disable, ...rest }) {
      if (enable && disable) throw new UsageError('use either --enable or --disable');
      return { ...(enable || disable ? { enabled: Boolean(enable) } : {}), ...(await secretOf(rest)) };
    },
  });
  routeVerb(webhooks, 'delete', 'webhooks', 'remove', { destroys: ['remove the webhook', 'removed'] });
  addDeliveries(webhooks);
}

function addDeliveries(webhooks: Command): void {
  routeVerb(webhooks, 'test', 'webhooks', 'test', {
    about: 'send a test event now; fail unless it arrives',
    after({ delivered }) {
      if (!delivered) throw new StartError('the test event was not delivered', 1);
    },
  });
  routeVerb(webhooks, 'deliveries', 'webhooks', 'deliveries', {
    examples: ['--status failed'],
    flags: { '--status <pending|delivered|failed>': 'only with this status', ...since, ...latest },
    view: {
      fields: 'id type status attempts made=created_at next last',
      cells: {
        attempts: ({ attempts }) => attempts.length,
        next: ({ next_attempt_at }) => when(next_attempt_at),
        last: ({ attempts }) => attempts.at(-1)?.error ?? attempts.at(-1)?.status_code,
      },
    },
  });
  const redeliver = {
    about: 'deliver one delivery again, or with --since all that failed',
    examples: ['farhand webhooks redeliver hook_… --since 6h'],
    flags: { '--since <time>': 'all since this time, such as 6h (ago)' },
  } as const;
  verb(
    webhooks,
    'redeliver <webhook> [delivery]',
    redeliver,
    async (client, webhook_id, delivery_id, options) => {
      const { since, output } = options;
      if ((delivery_id === undefined) === (since === undefined))
        throw new UsageError('give either the id of a delivery or --since TIME');
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

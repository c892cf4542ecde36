// farhand webhooks: who is told what happened, and how that went.
import { type Command, Option } from 'commander';
import { now } from '../../shared/clock.ts';
import { StartError, UsageError } from '../../shared/errors.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { collect, since, words } from './flags.ts';
import { readInput } from './input.ts';
import { printFields, when } from './output.ts';
import { routeVerb, type Told, type View } from './resource-verbs.ts';

const one: View<Awaited<ReturnType<Farhand['webhooks']['get']>>> = {
  fields: 'id url events machines enabled disabled_because=disabled_reason last_delivery',
  cells: {
    machines: ({ machine_ids }) => machine_ids?.join(', ') ?? 'all',
    last_delivery: ({ last_delivery: last }) =>
      last &&
      `${last.type} ${last.delivered ? 'delivered' : (last.error ?? last.status_code)} ${when(last.at)}`,
  },
};

export function addWebhooks(program: Command): void {
  const webhooks = program.command('webhooks').description('who is told what happened');
  routeVerb(webhooks, 'list', 'webhooks', 'list', {
    view: {
      fields: 'id url events enabled last',
      cells: {
        enabled: ({ enabled, disabled_reason }) => (enabled ? 'yes' : (disabled_reason ?? 'no')),
        last: ({ last_delivery }) => last_delivery && (last_delivery.delivered ? 'delivered' : 'failed'),
      },
    },
  });
  routeVerb(webhooks, 'get', 'webhooks', 'get', { view: one });
  shaped(
    routeVerb(webhooks, 'create <url>', 'webhooks', 'create', {
      about: 'tell a URL what happens',
      examples: ['https://example.org/hook --events "machine.*,command.failed" --secret-stdin < secret'],
      input: async (told) => ({
        ...(told.events === undefined && { events: ['*'] }),
        ...(await secretOf(told)),
      }),
      view: one,
    }),
  );
  shaped(
    routeVerb(webhooks, 'update', 'webhooks', 'update', {
      about: 'change what is told; --enable also forgives what failed',
      examples: ['--events "machine.*" --enable'],
      input: secretOf,
      view: one,
    }),
  )
    .option('--url <url>', 'where to')
    .addOption(new Option('--enable', 'deliver again').implies({ enabled: true }))
    .addOption(new Option('--disable', 'deliver no more').implies({ enabled: false }).conflicts('enable'));
  routeVerb(webhooks, 'delete', 'webhooks', 'remove', {
    destroys: { what: (id) => `remove the webhook ${id}`, done: 'removed' },
  });
  addDeliveries(webhooks);
}

function addDeliveries(webhooks: Command): void {
  routeVerb(webhooks, 'test', 'webhooks', 'test', {
    about: 'send a test event now; fails when it does not arrive',
    view: { fields: 'delivered status=status_code took=duration error' },
    after: ({ delivered }) => {
      if (!delivered) throw new StartError('the test event did not arrive', 1);
    },
  });
  routeVerb(webhooks, 'deliveries', 'webhooks', 'deliveries', {
    examples: ['--status failed'],
    filters: ['since', 'limit'],
    view: {
      fields: 'id type status attempts made=created_at next last',
      cells: {
        attempts: ({ attempts }) => attempts.length,
        next: ({ next_attempt_at }) => when(next_attempt_at),
        last: ({ attempts }) => attempts.at(-1)?.error ?? attempts.at(-1)?.status_code,
      },
    },
  }).option('--status <status>', 'pending, delivered or failed');
  routeVerb(webhooks, 'redeliver [delivery]', 'webhooks', 'redeliverSince', {
    about: 'deliver one again, or with --since all that did not arrive',
    examples: ['--since 6h'],
    instead: redeliverOne,
    view: { fields: 'redelivered' },
  }).option('--since <time>', 'all since then, such as 6h (ago)', since('--since', now));
}

/** The flags of create and update alike; a secret in an argument would be everybody's who may list processes. */
function shaped(command: Command): Command {
  return command
    .option('--events <list>', 'types and families such as machine.*, comma-separated', words)
    .option('--machine <machine>', 'events of this one alone; several times', collect)
    .option('--secret-stdin', 'read the secret that signs each delivery from standard input');
}

async function secretOf({ secretStdin }: Record<string, unknown>): Promise<{ secret?: string }> {
  if (!secretStdin) return {};
  return { secret: (await readInput(4096, 'a secret is one line')).replace(/\r?\n$/, '') };
}

async function redeliverOne(client: Farhand, told: Told): Promise<boolean> {
  const { webhook, delivery, since, output } = told;
  if ((delivery === undefined) === (since === undefined)) {
    throw new UsageError('say either a delivery, or --since');
  }
  if (typeof delivery !== 'string') return false;
  const ids = { webhook_id: String(webhook), delivery_id: delivery };
  const { id, status } = await client.webhooks.redeliver(ids);
  await printFields(output, { id, status }, { id, status });
  return true;
}

// farhand webhooks: who is told what happened, and how that went.
import type { Command } from 'commander';
import { now } from '../../shared/clock.ts';
import { StartError, UsageError } from '../../shared/errors.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { demandYes } from './ask.ts';
import { collect, given, limitOption, since, words } from './flags.ts';
import { readInput } from './input.ts';
import { machineNamed } from './named.ts';
import { type Format, printFields, printTable, span, when } from './output.ts';
import { type Common, every, verb, withClient } from './verb.ts';

export function addWebhooks(program: Command): void {
  const webhooks = program.command('webhooks').description('who is told what happened');
  verb(webhooks, 'list', 'all webhooks', 'farhand webhooks list').action(withClient(list));
  verb(
    webhooks,
    'get <webhook>',
    'one webhook, and how its last delivery went',
    'farhand webhooks get hook_…',
  ).action(
    withClient(async (client, webhook_id: string, { output }: Common) =>
      show(output, await client.webhooks.get({ webhook_id })),
    ),
  );
  shaped(
    verb(
      webhooks,
      'create <url>',
      'tell a URL what happens',
      'farhand webhooks create https://example.org/hook --events "machine.*,command.failed" --secret-stdin < secret',
    ),
  ).action(withClient(create));
  shaped(
    verb(
      webhooks,
      'update <webhook>',
      'change what is told; --enable also forgives what failed',
      'farhand webhooks update hook_… --events "machine.*" --enable',
    ),
  )
    .option('--url <url>', 'where to')
    .option('--enable', 'deliver again')
    .option('--disable', 'deliver no more')
    .action(withClient(update));
  addDeliveries(webhooks);
  verb(webhooks, 'delete <webhook>', 'remove it at once', 'farhand webhooks delete hook_… --yes')
    .option('--yes', 'do not ask')
    .action(withClient(remove));
}

function addDeliveries(webhooks: Command): void {
  verb(
    webhooks,
    'test <webhook>',
    'send a test event now; fails when it does not arrive',
    'farhand webhooks test hook_…',
  ).action(withClient(test));
  verb(
    webhooks,
    'deliveries <webhook>',
    'what was, or is to be, delivered',
    'farhand webhooks deliveries hook_… --status failed',
  )
    .option('--status <status>', 'pending, delivered or failed')
    .option('--since <time>', 'not before, such as 2h (ago)', since('--since', now))
    .addOption(limitOption(50))
    .action(withClient(deliveries));
  verb(
    webhooks,
    'redeliver <webhook> [delivery]',
    'deliver one again, or with --since all that did not arrive',
    'farhand webhooks redeliver hook_… --since 6h',
  )
    .option('--since <time>', 'all since then, such as 6h (ago)', since('--since', now))
    .action(withClient(redeliver));
}

interface Shape extends Common {
  events?: string[];
  machine?: string[];
  secretStdin?: boolean;
  url?: string;
  enable?: boolean;
  disable?: boolean;
}

/** The flags of create and update alike; a secret in an argument would be everybody's who may list processes. */
function shaped(command: Command): Command {
  return command
    .option('--events <list>', 'types and families such as machine.*, comma-separated', words)
    .option('--machine <machine>', 'events of this one alone; several times', collect)
    .option('--secret-stdin', 'read the secret that signs each delivery from standard input');
}

async function bodyOf(client: Farhand, { events, machine, secretStdin, enable, disable, url }: Shape) {
  if (enable && disable) throw new UsageError('say either --enable or --disable');
  const machine_ids = machine && (await Promise.all(machine.map((one) => machineNamed(client, one))));
  const enabled = enable ? true : disable ? false : undefined;
  return given({ events, machine_ids, enabled, url, secret: secretStdin ? await readSecret() : undefined });
}

async function readSecret(): Promise<string> {
  return (await readInput(4096, 'a secret is one line')).replace(/\r?\n$/, '');
}

type Input<O extends 'create' | 'update'> = Parameters<Farhand['webhooks'][O]>[0];

async function create(client: Farhand, url: string, shape: Shape): Promise<void> {
  // The broker judges which events there are.
  const body = { events: ['*'], ...(await bodyOf(client, shape)), url } as Input<'create'>;
  await show(shape.output, await client.webhooks.create(body));
}

async function update(client: Farhand, webhook_id: string, shape: Shape): Promise<void> {
  const body = { webhook_id, ...(await bodyOf(client, shape)) } as Input<'update'>;
  await show(shape.output, await client.webhooks.update(body));
}

type Webhook = Awaited<ReturnType<Farhand['webhooks']['get']>>;

async function show(format: Format, one: Webhook): Promise<void> {
  const last = one.last_delivery;
  await printFields(format, one, {
    id: one.id,
    url: one.url,
    events: one.events.join(', '),
    machines: one.machine_ids?.join(', ') ?? 'all',
    enabled: one.enabled,
    'disabled because': one.disabled_reason,
    'last delivery':
      last &&
      `${last.type} ${last.delivered ? 'delivered' : (last.error ?? last.status_code)} ${when(last.at)}`,
  });
}

async function list(client: Farhand, { output }: Common): Promise<void> {
  const all = await every((page) => client.webhooks.list(page));
  await printTable(output, all, {
    id: ({ id }) => id,
    url: ({ url }) => url,
    events: ({ events }) => events.join(','),
    enabled: ({ enabled, disabled_reason }) => (enabled ? 'yes' : (disabled_reason ?? 'no')),
    last: ({ last_delivery }) => last_delivery && (last_delivery.delivered ? 'delivered' : 'failed'),
  });
}

async function test(client: Farhand, webhook_id: string, { output }: Common): Promise<void> {
  const result = await client.webhooks.test({ webhook_id });
  const { delivered, status_code, duration, error } = result;
  await printFields(output, result, { delivered, status: status_code, took: span(duration), error });
  if (!delivered) throw new StartError('the test event did not arrive', 1);
}

interface DeliveriesOptions extends Common {
  status?: string;
  since?: string;
  limit: number;
}

async function deliveries(client: Farhand, webhook_id: string, options: DeliveriesOptions): Promise<void> {
  const { status, limit, output } = options;
  const wish = { webhook_id, ...given({ status, since: options.since }) } as Parameters<
    Farhand['webhooks']['deliveries']
  >[0];
  const found = await every((page) => client.webhooks.deliveries({ ...wish, ...page }), limit);
  await printTable(output, found, {
    id: ({ id }) => id,
    type: ({ type }) => type,
    status: (one) => one.status,
    attempts: ({ attempts }) => attempts.length,
    made: ({ created_at }) => when(created_at),
    next: ({ next_attempt_at }) => when(next_attempt_at),
    last: ({ attempts }) => attempts.at(-1)?.error ?? attempts.at(-1)?.status_code,
  });
}

async function redeliver(
  client: Farhand,
  webhook_id: string,
  delivery_id: string | undefined,
  options: Common & { since?: string },
): Promise<void> {
  if ((delivery_id === undefined) === (options.since === undefined)) {
    throw new UsageError('say either a delivery, or --since');
  }
  if (delivery_id !== undefined) {
    const { id, status } = await client.webhooks.redeliver({ webhook_id, delivery_id });
    return printFields(options.output, { id, status }, { id, status });
  }
  const answer = await client.webhooks.redeliverSince({ webhook_id, since: options.since ?? '' });
  await printFields(options.output, answer, { redelivered: answer.redelivered });
}

async function remove(
  client: Farhand,
  webhook_id: string,
  options: Common & { yes?: boolean },
): Promise<void> {
  await demandYes(options.yes, `remove the webhook ${webhook_id}`);
  await printFields(options.output, await client.webhooks.remove({ webhook_id }), { removed: webhook_id });
}

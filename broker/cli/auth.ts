// farhand auth: API keys.
import type { Command } from 'commander';
import { type Scope, scopes } from '../../shared/api/route.ts';
import { now } from '../../shared/clock.ts';
import { UsageError } from '../../shared/errors.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { demandYes } from './ask.ts';
import { collect, given, milliseconds, words } from './flags.ts';
import { machineNamed } from './named.ts';
import { hint, print, printFields, printTable, when } from './output.ts';
import { type Common, every, verb, withClient } from './verb.ts';

export function addAuth(program: Command): void {
  const auth = program.command('auth').description('API keys');
  verb(
    auth,
    'create-key',
    'make an API key; it is shown once',
    'farhand auth create-key --data-dir /var/lib/farhand-broker',
    'farhand auth create-key --name deploy --scopes commands:execute,files:write --tag web --expires 90d',
  )
    .option('--name <name>', 'what it is for', 'cli')
    .option('--scopes <list>', `comma-separated: ${scopes.join(', ')}`, 'admin')
    .option('--machine <machine>', 'reaches only this one; several times', collect)
    .option('--tag <tag>', 'reaches only machines with this tag; several times: with any of them', collect)
    .option('--expires <time>', 'in how long it ends, such as 90d', milliseconds('--expires'))
    .action((options: CreateOptions, command: Command) => {
      // Before a broker is started for it.
      readScopes(options.scopes);
      return withClient(create, { mayBegin: true })(options, command);
    });
  verb(auth, 'list-keys', 'all API keys', 'farhand auth list-keys').action(withClient(list));
  verb(
    auth,
    'rotate-key <key>',
    'give an API key a new secret, shown once; its id and rights stay',
    'farhand auth rotate-key key_… --grace 1h',
  )
    .option('--grace <time>', 'how long the secret before stays good (default 0)', milliseconds('--grace'))
    .option(
      '--expires <time>',
      'in how long it ends, such as 90d; as before unless told',
      milliseconds('--expires'),
    )
    .action(withClient(rotate));
  verb(
    auth,
    'revoke-key <key>',
    'end an API key at once: its streams close, what it queued is cancelled',
    'farhand auth revoke-key key_… --yes',
  )
    .option('--yes', 'do not ask')
    .action(withClient(revoke));
}

interface CreateOptions extends Common {
  name: string;
  scopes: string;
  machine?: string[];
  tag?: string[];
  expires?: number;
}

async function create(client: Farhand, options: CreateOptions): Promise<void> {
  const { name, machine, tag, expires, output } = options;
  const machine_ids = machine && (await Promise.all(machine.map((one) => machineNamed(client, one))));
  const limits = given({ machine_ids, tags: tag, expires_at: inTime(expires) });
  const key = await client.keys.create({ name, scopes: readScopes(options.scopes), ...limits });
  print(output, key, () => [key.key, '', 'Keep it: it is not shown again.']);
}

type RotateOptions = Common & { grace?: number; expires?: number };

async function rotate(
  client: Farhand,
  key_id: string,
  { grace, expires, output }: RotateOptions,
): Promise<void> {
  const key = await client.keys.rotate({ key_id, ...given({ grace, expires_at: inTime(expires) }) });
  print(output, key, () => [key.key, '', 'Keep it: it is not shown again.']);
}

const inTime = (ms: number | undefined): string | undefined =>
  ms === undefined ? undefined : new Date(now() + ms).toISOString();

function readScopes(text: string): Scope[] {
  return words(`${text}`).length === 0 ? [unknownScope(text)] : words(text).map(readScope);
}

function readScope(word: string): Scope {
  return scopes.find((one) => one === word) ?? unknownScope(word);
}

function unknownScope(word: string): never {
  throw new UsageError(`there is no scope ${word}; take some of ${scopes.join(', ')}`);
}

async function list(client: Farhand, { output }: Common): Promise<void> {
  const keys = await every((page) => client.keys.list({ sort: 'name', ...page }));
  await printTable(output, keys, {
    name: ({ name }) => name,
    id: ({ id }) => id,
    scopes: (one) => one.scopes.join(','),
    machines: ({ machine_ids, tags }) =>
      [...(machine_ids ?? []), ...(tags ?? []).map((tag) => `tag ${tag}`)].join(',') || 'all',
    used: ({ last_used_at }) => when(last_used_at),
    expires: ({ expires_at }) => when(expires_at),
  });
}

async function revoke(client: Farhand, key_id: string, options: Common & { yes?: boolean }): Promise<void> {
  await demandYes(options.yes, `revoke the key ${key_id}`);
  const answer = await client.keys.remove({ key_id });
  await printFields(options.output, answer, { revoked: key_id });
  const { schedules, webhooks } = answer;
  if (options.output !== 'text') return;
  if (schedules.length > 0) {
    hint(
      `These schedules ran with its right and run no more until another key changes them: ${schedules.join(', ')}`,
    );
  }
  if (webhooks.length > 0) {
    hint(
      `These webhooks told with its right and tell no more until another key enables them: ${webhooks.join(', ')}`,
    );
  }
}

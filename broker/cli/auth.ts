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
      return withClient(create)(options, command);
    });
  verb(auth, 'list-keys', 'all API keys').action(withClient(list));
  verb(auth, 'revoke-key <key>', 'end an API key at once: its streams close, what it queued is cancelled')
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
  const expires_at = expires === undefined ? undefined : new Date(now() + expires).toISOString();
  const limits = given({ machine_ids, tags: tag, expires_at });
  const key = await client.keys.create({ name, scopes: readScopes(options.scopes), ...limits } as Parameters<
    Farhand['keys']['create']
  >[0]);
  print(output, key, () => [key.key, '', 'Keep it: it is not shown again.']);
}

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
    expires: ({ expires_at }) => when(expires_at),
  });
}

async function revoke(client: Farhand, key_id: string, options: Common & { yes?: boolean }): Promise<void> {
  await demandYes(options.yes, `revoke the key ${key_id}`);
  const answer = await client.keys.remove({ key_id });
  await printFields(options.output, answer, { revoked: key_id });
  if (answer.schedules.length > 0 && options.output === 'text') {
    hint(
      `These schedules ran with its right and run no more until another key changes them: ${answer.schedules.join(', ')}`,
    );
  }
}

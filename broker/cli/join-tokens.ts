// farhand join-tokens: what new machines show.
import type { Command } from 'commander';
import type { Farhand } from '../../shared/sdk/index.ts';
import { demandYes } from './ask.ts';
import { count, given, milliseconds, words } from './flags.ts';
import { print, printFields, printTable, when } from './output.ts';
import { type Common, every, verb, withClient } from './verb.ts';

export function addJoinTokens(program: Command): void {
  const tokens = program.command('join-tokens').description('tokens that let new machines join');
  verb(
    tokens,
    'create',
    'make a join token; it is shown once',
    'farhand join-tokens create --uses 20 --tags web --expires-in 24h',
  )
    .option('--name <name>', 'what it is for; of one for a single machine, that machine’s name')
    .option('--expires-in <time>', 'such as 30m or 24h (default 1h)', milliseconds('--expires-in'))
    .option('--uses <count>', 'machines that may join with it (default 1)', count('--uses'))
    .option('--tags <list>', 'comma-separated; fixed for every machine that joins with it', words)
    .action(withClient(create, { mayBegin: true }));
  verb(tokens, 'list', 'all join tokens that are good', 'farhand join-tokens list').action(withClient(list));
  verb(
    tokens,
    'revoke <token>',
    'withdraw a join token, by its id: nobody joins with it any more',
    'farhand join-tokens revoke join_… --yes',
  )
    .option('--yes', 'do not ask')
    .action(withClient(revoke));
}

interface CreateOptions extends Common {
  name?: string;
  expiresIn?: number;
  uses?: number;
  tags?: string[];
}

async function create(
  client: Farhand,
  { name, expiresIn, uses, tags, output }: CreateOptions,
): Promise<void> {
  const token = await client.joinTokens.create(given({ name, expires_in: expiresIn, uses, tags }));
  print(output, token, () => [
    token.token,
    '',
    `Good for ${token.uses === 1 ? 'one machine' : `${token.uses} machines`} until ${token.expires_at}.`,
    ...installing(token),
  ]);
}

const ownBox = /https?:\/\/(localhost|127\.[\d.]+|\[::1\])[:/]/;

/** The line that installs an agent, from a broker that has packages; else why there is none. */
function installing(token: { install: string | null; install_missing: string | null }): string[] {
  const { install, install_missing } = token;
  if (!install) return install_missing ? ['', `No line that installs an agent: ${install_missing}`] : [];
  const where = ownBox.test(install)
    ? 'On this very box (for others, tell the broker its name: --public-url https://HOST:8420)'
    : 'On the new machine';
  return ['', `${where}; as root without sudo, leave that word out:`, `  ${install}`];
}

async function list(client: Farhand, { output }: Common): Promise<void> {
  const tokens = await every((page) => client.joinTokens.list(page));
  await printTable(output, tokens, {
    id: ({ id }) => id,
    name: ({ name }) => name,
    left: ({ uses_left, uses }) => `${uses_left} of ${uses}`,
    tags: ({ tags }) => tags?.join(','),
    expires: ({ expires_at }) => when(expires_at),
  });
}

async function revoke(
  client: Farhand,
  join_token_id: string,
  options: Common & { yes?: boolean },
): Promise<void> {
  await demandYes(options.yes, `withdraw the join token ${join_token_id}`);
  await printFields(options.output, await client.joinTokens.remove({ join_token_id }), {
    withdrawn: join_token_id,
  });
}

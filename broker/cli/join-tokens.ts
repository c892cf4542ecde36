// farhand join-tokens: what new machines show.
import { type Command, Option } from 'commander';
import { UsageError } from '../../shared/errors.ts';
import { duration } from '../../shared/settings.ts';
import { type Where, withBroker } from './connect.ts';
import { type Format, print } from './output.ts';

interface CreateOptions {
  dataDir?: string;
  name?: string;
  expiresIn?: string;
  uses?: string;
  tags?: string;
  output: Format;
}

export function addJoinTokens(program: Command, where: (options: { dataDir?: string }) => Where): void {
  const tokens = program.command('join-tokens').description('tokens that let new machines join');
  tokens
    .command('create')
    .description('make a join token; it is shown once')
    .option('--data-dir <dir>', 'the broker’s data directory, on its own box')
    .option('--name <name>', 'what it is for')
    .option('--expires-in <time>', 'such as 30m or 24h (default 1h)')
    .option('--uses <count>', 'machines that may join with it (default 1)')
    .option('--tags <list>', 'comma-separated; fixed for every machine that joins with it')
    .addOption(new Option('-o, --output <format>').choices(['text', 'json']).default('text'))
    .action(async (options: CreateOptions) => {
      const { name, expiresIn, uses, tags } = options;
      const input = {
        ...(name !== undefined && { name }),
        ...(expiresIn !== undefined && { expires_in: milliseconds(expiresIn) }),
        ...(uses !== undefined && { uses: count(uses) }),
        ...(tags !== undefined && { tags: tags.split(',') }),
      };
      const token = await withBroker(where(options), (client) => client.joinTokens.create(input));
      print(options.output, token, () => [
        token.token,
        '',
        `Good for ${token.uses} machine(s) until ${token.expires_at}.`,
      ]);
    });
}

function count(text: string): number {
  if (/^[1-9]\d{0,4}$/.test(text)) return Number(text);
  throw new UsageError(`--uses ${text}: must be a whole number from 1`);
}

function milliseconds(text: string): number {
  const parsed = duration.safeParse(text);
  if (parsed.success) return parsed.data;
  throw new UsageError(`--expires-in ${text}: ${parsed.error.issues[0]?.message}`);
}

// farhand auth: API keys.
import { type Command, Option } from 'commander';
import { scopes } from '../../shared/api/route.ts';
import { UsageError } from '../../shared/errors.ts';
import { type Where, withBroker } from './connect.ts';
import { type Format, print } from './output.ts';

interface CreateKeyOptions {
  dataDir?: string;
  name: string;
  scopes: string;
  output: Format;
}

export function addAuth(program: Command, where: (options: { dataDir?: string }) => Where): void {
  const auth = program.command('auth').description('API keys');
  auth
    .command('create-key')
    .description('make an API key; it is shown once')
    .option('--data-dir <dir>', 'the broker’s data directory, on its own box')
    .option('--name <name>', 'what it is for', 'cli')
    .option('--scopes <list>', `comma-separated: ${scopes.join(', ')}`, 'admin')
    .addOption(new Option('-o, --output <format>').choices(['text', 'json']).default('text'))
    .action(async (options: CreateKeyOptions) => {
      const input = { name: options.name, scopes: readScopes(options.scopes) };
      const key = await withBroker(where(options), (client) => client.keys.create(input));
      print(options.output, key, () => [key.key, '', 'Keep it: it is not shown again.']);
    });
}

function readScopes(text: string) {
  return text.split(',').map((word) => {
    const scope = scopes.find((one) => one === word.trim());
    if (!scope) throw new UsageError(`there is no scope ${word.trim()}; take some of ${scopes.join(', ')}`);
    return scope;
  });
}

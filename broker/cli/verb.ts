// What every verb has: where its broker is, how it prints, examples in its help.
import { type Command, Option } from 'commander';
import type { Farhand } from '../../shared/sdk/index.ts';
import { where, withBroker } from './connect.ts';
import type { Format } from './output.ts';

export interface Common {
  dataDir?: string;
  output: Format;
}

/** A verb below a noun; `words` as Commander has them: `get <machine>`. */
export function verb(parent: Command, words: string, what: string, ...examples: string[]): Command {
  const made = parent
    .command(words)
    .description(what)
    .option('--data-dir <dir>', 'the broker’s data directory, on its own box')
    .addOption(
      new Option('-o, --output <format>', 'text, or json for programs')
        .choices(['text', 'json'])
        .default('text'),
    );
  if (examples.length > 0)
    made.addHelpText('after', `\nExamples:\n${examples.map((line) => `  ${line}`).join('\n')}`);
  return made;
}

/** What a verb does, with a client before its arguments and options. */
export function withClient<A extends [...unknown[], Common]>(
  use: (client: Farhand, ...args: A) => Promise<void>,
) {
  return async (...all: [...A, Command]): Promise<void> => {
    // Commander gives the command itself last, its options before that.
    const args = all.slice(0, -1) as unknown as A;
    const options = args.at(-1) as Common;
    await withBroker(where(options), (client) => use(client, ...args));
  };
}

interface Page<T> {
  items: T[];
  has_more: boolean;
}

/** The items of a list over all its pages, at most so many. */
export async function every<T>(
  ask: (page: { limit: number; offset: number }) => Promise<Page<T>>,
  most = Number.POSITIVE_INFINITY,
): Promise<T[]> {
  const found: T[] = [];
  for (;;) {
    const page = await ask({ limit: Math.min(100, most - found.length), offset: found.length });
    found.push(...page.items);
    if (!page.has_more || found.length >= most || page.items.length === 0) return found;
  }
}

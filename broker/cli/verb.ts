// What every verb has: where its broker is, how it prints, examples in its help.
import { type Command, Option } from 'commander';
import type { Farhand } from '../../shared/sdk/index.ts';
import { withBroker } from './connect.ts';
import type { Format } from './output.ts';
import { type Where, where } from './where.ts';

export interface Common {
  dataDir?: string;
  output: Format;
}

/** A verb below a noun; `words` as Commander has them: `get <machine>`. */
export function verb(...all: Parameters<typeof bareVerb>): Command {
  return bareVerb(...all).addOption(
    new Option('-o, --output <format>', 'text, or json for programs')
      .choices(['text', 'json'])
      .default('text'),
  );
}

/** One that shows a terminal, and nothing for programs. */
export function bareVerb(
  parent: Command,
  words: string,
  what: string,
  ...examples: [string, ...string[]]
): Command {
  return parent
    .command(words)
    .description(what)
    .option('--data-dir <dir>', 'the broker’s data directory, on its own box')
    .addHelpText('after', `\nExamples:\n${examples.map((line) => `  ${line}`).join('\n')}`);
}

/** What a verb does, with a client before its arguments and options. */
export function withClient<A extends [...unknown[], Common]>(
  use: (client: Farhand, ...args: A) => Promise<void>,
  more: Pick<Where, 'mayBegin'> = {},
) {
  return async (...all: [...A, Command]): Promise<void> => {
    // Commander gives the command itself last, its options before that.
    const args = all.slice(0, -1) as unknown as A;
    const options = args.at(-1) as Common;
    await withBroker({ ...where(options), ...more }, (client) => use(client, ...args));
  };
}

/** The items of a list over all its pages, at most so many. */
export async function every<T>(
  ask: (page: { limit: number }) => AsyncIterable<T>,
  most = Number.POSITIVE_INFINITY,
): Promise<T[]> {
  const found: T[] = [];
  for await (const item of ask({ limit: Math.min(100, most) })) {
    found.push(item);
    if (found.length >= most) break;
  }
  return found;
}

// farhand join-tokens: what new machines show.
import type { Command } from 'commander';
import { count, milliseconds, words } from './flags.ts';
import { routeVerb } from './resource-verbs.ts';

export function addJoinTokens(program: Command): void {
  const tokens = program.command('join-tokens').description('tokens that let new machines join');
  routeVerb(tokens, 'create', 'joinTokens', 'create', {
    examples: ['--uses 20 --tags web --expires-in 24h'],
    lines: (token) => [
      token.token,
      '',
      `Good for ${token.uses === 1 ? 'one machine' : `${token.uses} machines`} until ${token.expires_at}.`,
      ...installing(token),
    ],
    mayBegin: true,
  })
    .option('--name <name>', 'what it is for; of one for a single machine, that machine’s name')
    .option('--expires-in <time>', 'such as 30m or 24h (default 1h)', milliseconds('--expires-in'))
    .option('--uses <count>', 'machines that may join with it (default 1)', count('--uses'))
    .option('--tags <list>', 'comma-separated; fixed for every machine that joins with it', words);
  routeVerb(tokens, 'list', 'joinTokens', 'list', {
    view: {
      fields: 'id name left tags expires=expires_at',
      cells: { left: ({ uses_left, uses }) => `${uses_left} of ${uses}` },
    },
  });
  routeVerb(tokens, 'revoke', 'joinTokens', 'remove', {
    about: 'withdraw a join token, by its id: nobody joins with it any more',
    destroys: { what: (id) => `withdraw the join token ${id}`, done: 'withdrawn' },
  });
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

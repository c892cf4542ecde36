// farhand auth: API keys.
import { type Command, Option } from 'commander';
import { scopes } from '../../shared/api/route.ts';
import { now } from '../../shared/clock.ts';
import { UsageError } from '../../shared/errors.ts';
import { collect, milliseconds, words } from './flags.ts';
import { hint } from './output.ts';
import { routeVerb } from './resource-verbs.ts';

const lines = ({ key }: { key: string }): string[] => [key, '', 'Keep it: it is not shown again.'];

export function addAuth(program: Command): void {
  const auth = program.command('auth').description('API keys');
  routeVerb(auth, 'create-key', 'keys', 'create', {
    about: 'make an API key; it is shown once',
    examples: [
      '--data-dir /var/lib/farhand-broker',
      '--name deploy --scopes commands:execute,files:write --tag web --expires 90d',
    ],
    lines,
    mayBegin: true,
  })
    .option('--name <name>', 'what it is for', 'cli')
    .addOption(
      new Option('--scopes <list>', `comma-separated: ${scopes.join(', ')}`)
        .argParser(readScopes)
        .default(['admin'], 'admin'),
    )
    .option('--machine <machine>', 'reaches only this one; several times', collect)
    .option('--tag <tag>', 'reaches only machines with this tag; several times: with any of them', collect)
    .option('--expires <time>', 'in how long it ends, such as 90d', inTime);
  routeVerb(auth, 'list-keys', 'keys', 'list', {
    fixed: { sort: 'name' },
    view: {
      fields: 'name id scopes machines used=last_used_at expires=expires_at',
      cells: {
        machines: ({ machine_ids, tags }) =>
          [...(machine_ids ?? []), ...(tags ?? []).map((tag) => `tag ${tag}`)].join(',') || 'all',
      },
    },
  });
  routeVerb(auth, 'rotate-key', 'keys', 'rotate', {
    about: 'give an API key a new secret, shown once; its id and rights stay',
    examples: ['--grace 1h'],
    lines,
  })
    .option('--grace <time>', 'how long the secret before stays good (default 0)', milliseconds('--grace'))
    .option('--expires <time>', 'in how long it ends, such as 90d; as before unless told', inTime);
  routeVerb(auth, 'revoke-key', 'keys', 'remove', {
    about: 'end an API key at once: its streams close, what it queued is cancelled',
    destroys: { what: (id) => `revoke the key ${id}`, done: 'revoked' },
    after: ({ schedules, webhooks }, format) => {
      if (format === 'json') return;
      if (schedules.length > 0) hint(`${orphaned.schedules}: ${schedules.join(', ')}`);
      if (webhooks.length > 0) hint(`${orphaned.webhooks}: ${webhooks.join(', ')}`);
    },
  });
}

const orphaned = {
  schedules: 'These schedules ran with its right and run no more until another key changes them',
  webhooks: 'These webhooks told with its right and tell no more until another key enables them',
};

const inTime = (text: string): string => new Date(now() + milliseconds('--expires')(text)).toISOString();

function readScopes(text: string): string[] {
  const named = words(text);
  const unknown = named.length === 0 ? text : named.find((word) => !scopes.some((one) => one === word));
  if (unknown === undefined) return named;
  throw new UsageError(`there is no scope ${unknown}; take some of ${scopes.join(', ')}`);
}

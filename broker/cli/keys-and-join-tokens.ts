// The verbs farhand auth, for API keys, and farhand join-tokens, for the tokens with which machines join.
import { type Command, InvalidArgumentError } from 'commander';
import { scopes } from '../../shared/api/route.ts';
import { now } from '../../shared/clock.ts';
import { packaged } from '../../shared/paths-in-checkout-or-package.ts';
import { quoteForShell } from '../../shared/quote-for-shell.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { duration, list } from './declare-verb.ts';
import { type Format, hint } from './print.ts';
import { checkPrinted } from './stdout-stderr-and-exit.ts';
import { type Given, routeVerb } from './verb-from-route.ts';

/**
 * Prints a new key alone on standard output, so that a script can store it in a file or a variable. `nextVerb`: the
 * verb to use if the key could not be printed.
 */
const secretOnce = (nextVerb: string) => ({
  text: ({ key }: { key: string }): string[] => [key],
  async after({ id }: { id: string }, format: Format): Promise<void> {
    const next = `the key is valid, but could not be written to standard output; run farhand auth ${nextVerb} ${id}`;
    if ((await checkPrinted(next)) && format === 'text') hint('Store this key now: it is not printed again.');
  },
});

const limiting = {
  '--machine <list>': 'limit the key to these machines, comma-separated',
  '--tags <list>': 'limit the key to machines with any of these tags, comma-separated',
};

export function addAuth(program: Command): void {
  const auth = program.command('auth').description('manage API keys');
  const create = routeVerb(auth, 'create-key', 'keys', 'create', {
    about: 'create an API key and print it once',
    examples: [
      '--data-dir /var/lib/farhand-broker',
      '--name deploy --scopes machines:read,commands:execute,commands:read --tags web --expires-in 90d',
    ],
    flags: {
      '--name <name>': 'name of the key (default: cli)',
      '--scopes <list>': `scopes of the key: some of ${scopes.join(', ')} (default: admin)`,
      ...limiting,
      '--expires-in <duration>': 'time after which the key expires, such as 90d (default: never)',
    },
    defaults: { name: 'cli', scopes: ['admin'] },
    input: expiry,
    ...secretOnce('revoke-key'),
    mayCreate: true,
  });
  routeVerb(auth, 'list-keys', 'keys', 'list', {
    defaults: { sort: 'name' },
    view: {
      fields: 'name id scopes machines used=last_used_at expires=expires_at',
      cells: { machines: limits },
    },
  });
  const update = routeVerb(auth, 'update-key', 'keys', 'update', {
    about: 'change the name, rights or expiry of an API key; its secret stays the same',
    examples: ['--scopes machines:read,files:read --expires-in 90d'],
    flags: {
      '--name <name>': 'new name of the key',
      '--scopes <list>': `scopes of the key: some of ${scopes.join(', ')}`,
      ...limiting,
      '--expires-in <duration>': 'time after which the key expires, such as 90d',
    },
    input: expiry,
  });
  const rotate = routeVerb(auth, 'rotate-key', 'keys', 'rotate', {
    about: 'replace the secret of an API key and print the new one once; the key keeps its id and rights',
    examples: ['--grace 1h'],
    flags: {
      '--grace <duration>': 'time for which the old secret stays valid (default: 0)',
      '--expires-in <duration>': 'time after which the key expires, such as 90d (default: as before)',
    },
    input: expiry,
    ...secretOnce('rotate-key'),
  });
  routeVerb(auth, 'revoke-key', 'keys', 'remove', {
    about: 'revoke an API key at once, close its streams and cancel its queued commands',
    destroys: ['revoke the key', 'revoked'],
    after(left, format) {
      if (format !== 'json') explainWhatIsLeft(left);
    },
  });
  checkScopes(create, update);
  checkValidity(create, rotate);
  addLogins(auth);
}

function checkScopes(...verbs: Command[]): void {
  for (const { options } of verbs) {
    const option = options.find(({ long }) => long === '--scopes');
    option?.choices(scopes).argParser(readScopes);
  }
}

/** Refuses --expires-in 0s: a new secret must be valid for some time. `update-key` accepts 0s to turn a key off. */
function checkValidity(...verbs: Command[]): void {
  for (const { options } of verbs) {
    for (const option of options.filter((one) => one.attributeName() === 'expiresIn'))
      option.argParser(readValidity);
  }
}

function addLogins(auth: Command): void {
  routeVerb(auth, 'list-logins', 'logins', 'list', {
    about: 'list the logins of browsers',
    defaults: { sort: '-last_used_at' },
    view: { fields: 'name id key=key_name address created=created_at used=last_used_at' },
  });
  routeVerb(auth, 'end-login', 'logins', 'remove', { destroys: ['end the login', 'ended'] });
}

/** Returns the machines and tags that a key may use, as text. */
const limits = (key: { machine_ids: string[] | null; tags: string[] | null }): string =>
  [...(key.machine_ids ?? []), ...(key.tags ?? []).map((tag) => `tag ${tag}`)].join(', ') || 'all';

function expiry({ expiresIn }: Given): { expires_at?: string } {
  return typeof expiresIn === 'number' ? { expires_at: new Date(now() + expiresIn).toISOString() } : {};
}

function readValidity(text: string): number {
  const ms = duration(text);
  if (ms > 0) return ms;
  throw new InvalidArgumentError('It must be longer than 0.');
}

function readScopes(text: string, before?: string[]): string[] {
  const named = list(text, before);
  const unknown = named.length === 0 ? text : named.find((word) => !scopes.some((one) => one === word));
  if (unknown === undefined) return named;
  throw new InvalidArgumentError(`There is no scope ${unknown}; use some of ${scopes.join(', ')}.`);
}

export function addJoinTokens(program: Command): void {
  const tokens = program.command('join-tokens').description('manage tokens that let new machines join');
  routeVerb(tokens, 'create', 'joinTokens', 'create', {
    examples: ['--uses 20 --tags web --expires-in 24h'],
    flags: {
      '--name <name>':
        'name of the token; if --uses is 1, the install command gives the machine the same name',
      '--expires-in <duration>': 'time after which the token expires (default: 1h)',
      '--uses <count>': 'number of machines that may join with the token (default: 1)',
      '--tags <list>': 'tags of every machine that joins with the token',
    },
    text: ({ token }) => [token],
    async after(token, format, client) {
      const next = `the token is valid, but could not be written to standard output; run farhand join-tokens revoke ${token.id}`;
      if (!(await checkPrinted(next)) || format === 'json') return;
      const machines = token.uses === 1 ? 'one machine' : `${token.uses} machines`;
      const validity = `The token is valid for ${machines} until ${token.expires_at}.`;
      hint(['', validity, ...(await installLines(token, client))].join('\n'));
    },
    mayCreate: true,
  });
  routeVerb(tokens, 'list', 'joinTokens', 'list', {
    view: {
      fields: 'id name left tags expires=expires_at',
      cells: { left: ({ uses_left, uses }) => `${uses_left} of ${uses}` },
    },
  });
  routeVerb(tokens, 'revoke', 'joinTokens', 'remove', {
    about: 'revoke a join token by its id, so that no machine can join with it any more',
    destroys: ['revoke the join token', 'revoked'],
  });
}

async function fromCheckout(client: Farhand, name: string | null): Promise<string> {
  const { grpc_address } = await client.service.info().catch(() => ({ grpc_address: '' }));
  // If the broker listens on every address, grpc_address is only a port, or its host is 0.0.0.0 or [::]. The printed
  // command then has the host 127.0.0.1. A broker with `--local` has no address, so the command has 127.0.0.1:8421.
  const address =
    grpc_address.replace(/^(?:(?:0\.0\.0\.0|\[::\])?:)?(\d+)$/, '127.0.0.1:$1') || '127.0.0.1:8421';
  const named = name === null ? '' : ` --name ${quoteForShell(name)}`;
  return `To start an agent from a checkout: npx node agent/main.ts --broker ${address} --join-token-file FILE${named}`;
}

const loopback = /https?:\/\/(localhost|127\.[\d.]+|\[::1\])[:/]/;

/** Returns the command that installs an agent, or the reason why there is none. */
async function installLines(
  token: { install: string | null; install_missing: string | null; name: string | null; uses: number },
  client: Farhand,
): Promise<string[]> {
  const { install, install_missing } = token;
  if (!install) {
    const missing = install_missing ? ['', `No command to install an agent: ${install_missing}`] : [];
    return packaged
      ? missing
      : [...missing, '', await fromCheckout(client, token.uses === 1 ? token.name : null)];
  }
  const isLocal = loopback.test(install);
  const lines = [
    '',
    `Run this on ${isLocal ? 'this' : 'the new'} machine; if you are root, leave out sudo:`,
    `  ${install}`,
  ];
  const forOthers = 'For other machines, start the broker with a --public-url that they can reach.';
  return isLocal ? [...lines, forOthers] : lines;
}

interface LeftByKey {
  schedules: readonly string[];
  webhooks: readonly string[];
  /** The fields below are undefined if the broker has version 0.1.0. */
  alert_channels?: readonly string[];
  saved_commands?: readonly string[];
}

function explainWhatIsLeft({
  schedules,
  webhooks,
  alert_channels = [],
  saved_commands = [],
}: LeftByKey): void {
  if (schedules.length > 0)
    hint(
      `these schedules no longer run: ${schedules.join(', ')}. They had the rights of the revoked key. To run them with the rights of another key, log in with that key. Then set the machine (or tags) and the command of each schedule again: farhand schedules update ID`,
    );
  if (webhooks.length > 0)
    hint(
      `these webhooks no longer send events: ${webhooks.join(', ')}. They had the rights of the revoked key. To send events with the rights of another key, log in with that key. Then enable each webhook: farhand webhooks update ID --enable`,
    );
  if (alert_channels.length > 0)
    hint(
      `these alert channels no longer send notifications: ${alert_channels.join(', ')}. They had the rights of the revoked key. To send notifications with the rights of another key, log in with that key. Then enable each channel: farhand alert-channels update ID --enable`,
    );
  const check =
    'the revoked key made the last change to each of these saved commands; check that they are right';
  if (saved_commands.length > 0) hint(`${check}: ${saved_commands.join(', ')}`);
}

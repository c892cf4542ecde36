// farhand login, logout, whoami: which broker this is the command line of, and with whose right.
import { resolve } from 'node:path';
import type { Command } from 'commander';
import { StartError, UsageError } from '../../shared/errors.ts';
import { reasonOf } from '../../shared/sdk/failure.ts';
import { type Farhand, FarhandError } from '../../shared/sdk/index.ts';
import { askSecret, askText, attended } from './ask.ts';
import { withBroker, withUrl } from './connect.ts';
import { given } from './flags.ts';
import { readInput } from './input.ts';
import { hint, print, printFields, when } from './output.ts';
import { forgetSaved, savedAt, writeSaved } from './saved.ts';
import { type Common, verb } from './verb.ts';
import { brokerUrl, type Where, where } from './where.ts';

interface LoginOptions extends Common {
  keyStdin?: boolean;
  pin?: string;
  ca?: string;
  insecure?: boolean;
}

export function addLogin(program: Command): void {
  verb(
    program,
    'login [url]',
    'keep which broker is meant, and a key of it',
    'farhand login https://farhand.example.org',
    'farhand login https://10.0.0.5:8420 --pin sha256//… --key-stdin < key',
  )
    .option('--key-stdin', 'read the key from standard input')
    .option('--pin <pin>', 'sha256//BASE64 of the key that the broker’s own certificate has')
    .option('--ca <file>', 'the authority that the broker’s certificate is of')
    .option('--insecure', 'send the key over plain http also to another machine')
    .action(login);
}

async function login(told: string | undefined, options: LoginOptions): Promise<void> {
  const { keyStdin, output } = options;
  if (!keyStdin && !attended()) {
    throw new UsageError(`nobody is here to ask: say ${told ? '' : 'the URL, and '}--key-stdin`);
  }
  const url = brokerUrl(told ?? (await askText('Where is the broker? (https://…)')));
  const place = { dataDir: undefined, url, apiKey: undefined, ...knownBy(options) };
  await meet(place);
  const api_key = keyStdin ? await firstLine() : await askSecret('API key');
  const me = await withUrl({ ...place, apiKey: api_key }, (client) => client.keys.me());
  await writeSaved({ url, api_key, ...given(knownBy(options)) });
  print(output, me, () => [
    `Logged in to ${url} as ${me.name} (${me.scopes.join(', ')}); kept in ${savedAt()}.`,
  ]);
  if (process.env.FARHAND_URL || process.env.FARHAND_API_KEY) {
    hint('FARHAND_URL and FARHAND_API_KEY are set: they outweigh this.');
  }
}

/** How its certificate is known; what is kept must mean the same from everywhere. */
function knownBy({ pin, ca, insecure }: LoginOptions) {
  const { FARHAND_PIN, FARHAND_CA, FARHAND_INSECURE } = process.env;
  const file = ca ?? (FARHAND_CA || undefined);
  return {
    pin: pin ?? (FARHAND_PIN || undefined),
    ca: file === undefined ? undefined : resolve(file),
    insecure: insecure ?? (FARHAND_INSECURE === '1' || undefined),
  };
}

/** Before a key is asked for: whether it is a broker, and the one that is meant. */
async function meet(place: Where & { url: string }): Promise<void> {
  try {
    await withUrl(place, (client) => client.service.healthz());
  } catch (error) {
    if (!(error instanceof FarhandError) || error.code !== 'no_answer') throw error;
    const advice = adviceOn(place, reasonOf(error.cause) ?? '');
    if (!advice) throw error;
    throw new StartError(`${error.message}: ${advice}`, 1, { cause: error });
  }
}

function adviceOn({ url, pin, ca }: Where & { url: string }, why: string): string | undefined {
  if (new URL(url).port === '8421') return '8421 is the port of agents; the REST API is at 8420';
  if (pin || ca || !/CERT|VERIFY|ISSUER|SELF_SIGNED/.test(why)) return undefined;
  return 'where its certificate is the broker’s own, say --pin sha256//…; farhand whoami --data-dir DIR on its box shows it';
}

async function firstLine(): Promise<string> {
  const [line = ''] = (await readInput(64 * 1024, 'a key is one line')).split('\n');
  if (line.trim() === '') throw new UsageError('standard input holds no key');
  return line.trim();
}

export function addLogout(program: Command): void {
  verb(program, 'logout', 'forget the broker and the key of farhand login', 'farhand logout').action(
    ({ output }: Common) => {
      const there = forgetSaved();
      print(output, { logged_out: there }, () => [
        there ? 'Forgotten here; the key itself is still good.' : 'Nothing was kept.',
      ]);
    },
  );
}

export function addWhoami(program: Command): void {
  verb(
    program,
    'whoami',
    'which broker, which key, and what it may',
    'farhand whoami',
    'farhand whoami --data-dir /var/lib/farhand-broker    its pin too, for --pin elsewhere',
  ).action(async (options: Common) => {
    const place = where(options);
    await withBroker(place, async (client) => {
      const [me, { tls_pin }] = [await client.keys.me(), await client.service.info()];
      const fields = { ...fieldsOf(place, me), pin: tls_pin };
      await printFields(options.output, { broker: brokerOf(place), ...me, tls_pin }, fields);
    });
  });
}

const brokerOf = ({ dataDir, url }: Where): string | undefined => dataDir ?? url;

function fieldsOf(place: Where, me: Awaited<ReturnType<Farhand['keys']['me']>>) {
  return {
    broker: brokerOf(place),
    key: me.name,
    id: me.id,
    scopes: me.scopes.join(', '),
    machines: [...(me.machine_ids ?? []), ...(me.tags ?? []).map((tag) => `tag ${tag}`)].join(', ') || 'all',
    expires: me.expires_at ? when(me.expires_at) : 'never',
  };
}

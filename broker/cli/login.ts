// farhand login, logout, whoami: which broker this is the command line of, and with whose right.
import type { Command } from 'commander';
import { UsageError } from '../../shared/errors.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { askSecret, askText, attended } from './ask.ts';
import { withBroker } from './connect.ts';
import { given } from './flags.ts';
import { hint, print, printFields, when } from './output.ts';
import { forgetSaved, type Saved, savedAt, writeSaved } from './saved.ts';
import { type Common, verb } from './verb.ts';
import { type Where, where } from './where.ts';

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
  const { keyStdin, pin, ca, insecure, output } = options;
  if (!keyStdin && !attended()) throw new UsageError('nobody is here to ask: say the URL, and --key-stdin');
  const url = (told ?? (await askText('Where is the broker? (https://…)'))).replace(/\/+$/, '');
  const api_key = keyStdin ? await firstLine() : await askSecret('API key');
  const saved: Saved = { url, api_key, ...given({ pin, ca, insecure }) };
  const place: Where = { dataDir: undefined, url, apiKey: api_key, pin, ca, insecure };
  const me = await withBroker(place, (client) => client.keys.me());
  writeSaved(saved);
  print(output, me, () => [
    `Logged in to ${url} as ${me.name} (${me.scopes.join(', ')}); kept in ${savedAt()}.`,
  ]);
  if (process.env.FARHAND_URL || process.env.FARHAND_API_KEY) {
    hint('FARHAND_URL and FARHAND_API_KEY are set: they outweigh this.');
  }
}

async function firstLine(): Promise<string> {
  let text = '';
  for await (const chunk of process.stdin.setEncoding('utf8')) text += chunk;
  const [line = ''] = text.split('\n');
  if (line.trim() === '') throw new UsageError('standard input holds no key');
  return line.trim();
}

export function addLogout(program: Command): void {
  verb(program, 'logout', 'forget the broker and the key of farhand login').action(({ output }: Common) => {
    const there = forgetSaved();
    print(output, { logged_out: there }, () => [
      there ? 'Forgotten here; the key itself is still good.' : 'Nothing was kept.',
    ]);
  });
}

export function addWhoami(program: Command): void {
  verb(program, 'whoami', 'which broker, which key, and what it may').action(async (options: Common) => {
    const place = where(options);
    await withBroker(place, async (client) => {
      const me = await client.keys.me();
      await printFields(options.output, { broker: brokerOf(place), ...me }, fieldsOf(place, me));
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

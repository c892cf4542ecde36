// The verbs farhand login, logout and whoami, for the broker and API key that this command line uses.
import { resolve } from 'node:path';
import type { Command } from 'commander';
import { UsageError } from '../../shared/errors.ts';
import {
  brokerUrl,
  loginFile,
  removeLogin,
  trustOf,
  where,
  withBroker,
  withUrl,
  writeLogin,
} from './connect-to-broker.ts';
import { localVerb, type Options } from './declare-verb.ts';
import { hint, print } from './print.ts';
import { isInteractive, prompt, readInput } from './prompt.ts';
import { printView } from './verb-from-route.ts';

const flags = {
  '--key-stdin': 'read the API key from standard input',
  '--pin <pin>': 'hash of the public key in the broker’s own certificate, as sha256//BASE64',
  '--ca <file>': 'PEM file of the certificate authority that signed the broker’s certificate',
  '--insecure': 'allow http URLs of other machines; the API key is then sent unencrypted',
} as const;

export function addLogin(program: Command): void {
  const spec = {
    about: 'store the URL of a broker and an API key',
    examples: [
      'farhand login https://farhand.example.org',
      'farhand login https://10.0.0.5:8420 --pin sha256//… --key-stdin < key',
    ],
    flags,
  };
  localVerb(program, 'login [url]', spec, login);
}

async function login(text: string | undefined, options: Options<typeof flags>): Promise<void> {
  const { keyStdin, output } = options;
  // With --key-stdin, standard input contains the key. A prompt for the URL would read that key, and print it.
  if (keyStdin && text === undefined) throw new UsageError('--key-stdin needs the URL of the broker too');
  if (!keyStdin && !isInteractive()) {
    throw new UsageError(
      `there is no terminal in which to ask for input; add ${text ? '' : 'the URL and '}--key-stdin`,
    );
  }
  const url = brokerUrl(text ?? (await prompt('URL of the broker (https://…)')));
  const trust = trustOf(options);
  // The stored path is absolute, so that it is valid in every working directory.
  if (trust.ca !== undefined) trust.ca = resolve(trust.ca);
  const place = { dataDir: undefined, url, apiKey: undefined, ...trust };
  // The user is asked for the key only after a broker with the expected certificate has answered.
  await withUrl(place, (client) => client.service.healthz(), 'add --pin sha256//…');
  const api_key = (keyStdin ? await firstLine() : await prompt('API key', 'secret')).trim();
  if (!/^[\x21-\x7e]+$/.test(api_key)) {
    const what = keyStdin ? 'the first line of standard input' : 'what was typed';
    throw new UsageError(`${what} is not an API key: keys have no spaces and only visible ASCII characters`);
  }
  const me = await withUrl({ ...place, apiKey: api_key }, (client) => client.keys.me());
  await writeLogin({ url, api_key, ...trust });
  await print(output, me, () => [
    `Logged in to ${url} as ${me.name} (${me.scopes.join(', ')}); stored in ${loginFile()}.`,
  ]);
  if (process.env.FARHAND_URL || process.env.FARHAND_API_KEY)
    hint(
      'The variables FARHAND_URL and FARHAND_API_KEY take precedence over this login; unset them to use it.',
    );
}

async function firstLine(): Promise<string> {
  const [line = ''] = (await readInput(64 * 1024, 'an API key is one line')).split('\n');
  if (line.trim() === '') throw new UsageError('standard input is empty; it must contain the API key');
  return line;
}

export function addLogout(program: Command): void {
  const spec = { about: 'delete the stored URL and API key', examples: ['farhand logout'] };
  localVerb(program, 'logout', spec, ({ output }) => {
    const removed = removeLogin();
    const text = removed ? 'The stored login was deleted; its API key stays valid.' : 'No login was stored.';
    return print(output, { logged_out: removed }, () => [text]);
  });
}

export function addWhoami(program: Command): void {
  const spec = {
    about: 'print which broker and key are used, and what the key may do',
    examples: [
      'farhand whoami',
      'farhand whoami --data-dir /var/lib/farhand-broker    prints the pin for farhand login --pin on another machine',
    ],
  };
  localVerb(program, 'whoami', spec, async (options) => {
    const place = where(options);
    await withBroker(place, async (client) => {
      const [me, { tls_pin }] = [await client.keys.me(), await client.service.info()];
      const all = { broker: place.dataDir ?? place.url, ...me, tls_pin };
      // Calls over the socket file use a built-in key. Its creation time, 1970, is left out of the text output.
      const { created_at, ...rest } = all;
      const isLocal = Date.parse(created_at) === 0 && options.output === 'text';
      await printView(client, options.output, isLocal ? rest : all);
    });
  });
}

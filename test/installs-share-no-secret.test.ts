// Two fresh installations have no secret in common. The test searches the files of one for every long token in the
// files of the other.
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { expect, test } from 'vitest';
import { bootId } from '../agent/boot-id.ts';
import { startFarhand } from './start-farhand.ts';

/** Strings that may be a key, a hash or an id: hexadecimal, base64, or the alphabet of Farhand's ids. */
const token = /[0-9A-Za-z+/_-]{16,}={0,2}/g;
/** A certificate is public, and is compared as a whole: two certificates of the same second share some lines. */
const certificate = /-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----/g;
/** Strings that are words, as in names and in the BEGIN and END lines of PEM. */
const plain = /^([a-z_/-]+|[A-Z_/-]+)$/;

/** The id of this boot of the machine, which the journal of each agent contains. It is no secret. */
const boot = bootId();

/** Returns the text of a file, or the rows of a database without its schema. */
function textOf(file: string): string {
  if (!file.endsWith('.db')) {
    const text = readFileSync(file, 'latin1').replaceAll('\\n', '\n');
    return text.replaceAll(certificate, (one) => one.replaceAll('\n', ''));
  }
  const database = new DatabaseSync(file, { readOnly: true });
  try {
    const tables = database.prepare("SELECT name FROM sqlite_master WHERE type = 'table'").all();
    const rows = tables.flatMap(({ name }) => database.prepare(`SELECT * FROM "${String(name)}"`).all());
    // Leaves out the fingerprints of requests, which are equal for equal requests.
    const received = rows.flatMap((row) =>
      Object.entries(row).filter(([column]) => column !== 'fingerprint'),
    );
    return received.map(([, value]) => String(value)).join('\n');
  } finally {
    database.close();
  }
}

/** Returns every token below a directory, with its file. */
function tokensIn(directory: string): Map<string, string> {
  const files = readdirSync(directory, { recursive: true, withFileTypes: true });
  // Leaves out locks and logs of databases, because the rows are read from the database itself.
  const read = files.filter((one) => one.isFile() && !/^lock\.db|\.db-\w+$/.test(one.name));
  const found = read.flatMap(({ parentPath, name }) =>
    [...textOf(join(parentPath, name)).matchAll(token)].map(([word]): [string, string] => [word, name]),
  );
  return new Map(found.filter(([word]) => !plain.test(word) && word !== boot));
}

/**
 * Starts a broker and an agent, with one object of each kind that has a secret. The names of objects are the same in
 * each installation.
 */
async function install(): Promise<Map<string, string>> {
  const { client, dataDir, ...system } = await startFarhand();
  const agent = await system.agent({ name: 'same' });
  await client.webhooks.create({ url: 'https://example.org/', events: ['*'], secret: 'of a webhook' });
  await client.joinTokens.create({ name: 'same' });
  await client.commands.create({ machine_id: agent.machineId, command: 'true' });
  return new Map([...tokensIn(agent.dataDir), ...tokensIn(dataDir)]);
}

test('two fresh installs have no key, hash, id or sealed secret in common', async () => {
  const [first, second] = [await install(), await install()];
  const shared = [...first].filter(([word]) => second.has(word));
  expect(shared).toEqual([]);
  // Makes sure that the test has read all files with secrets.
  const kept = ['authority.json', 'identity.json', 'state.json', 'webhooks.key', 'history.db'];
  expect([...new Set(second.values())]).toEqual(expect.arrayContaining(kept));
});

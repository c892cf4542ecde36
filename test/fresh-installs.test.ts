// Two fresh installs have no secret in common: every long token in every file of one is looked for in the other.
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { expect, test } from 'vitest';
import { startFarhand } from './start-farhand.ts';

/** What may be a key, a hash or an id, as text: hexadecimal, base64, or our own letters. */
const token = /[0-9A-Za-z+/_-]{16,}={0,2}/g;
/** A certificate is public, and one made in the same second has some lines in common: it counts as a whole. */
const certificate = /-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----/g;
/** Words, as in the names of things and the frames of PEM. */
const plain = /^([a-z_/-]+|[A-Z_/-]+)$/;

/** All that a file says: of a database its rows, for two schemas are alike. */
function textOf(file: string): string {
  if (!file.endsWith('.db')) {
    const text = readFileSync(file, 'latin1').replaceAll('\\n', '\n');
    return text.replaceAll(certificate, (one) => one.replaceAll('\n', ''));
  }
  const database = new DatabaseSync(file, { readOnly: true });
  try {
    const tables = database.prepare("SELECT name FROM sqlite_master WHERE type = 'table'").all();
    const rows = tables.flatMap(({ name }) => database.prepare(`SELECT * FROM "${String(name)}"`).all());
    // Who asks for the same has the same fingerprint of what was asked.
    const received = rows.flatMap((row) =>
      Object.entries(row).filter(([column]) => column !== 'fingerprint'),
    );
    return received.map(([, value]) => String(value)).join('\n');
  } finally {
    database.close();
  }
}

/** Every token below a directory, and the file it stands in. */
function tokensIn(directory: string): Map<string, string> {
  const files = readdirSync(directory, { recursive: true, withFileTypes: true });
  // A lock is held, and a log of a database is read through it.
  const read = files.filter((one) => one.isFile() && !/^lock\.db|\.db-\w+$/.test(one.name));
  const found = read.flatMap(({ parentPath, name }) =>
    [...textOf(join(parentPath, name)).matchAll(token)].map(([word]): [string, string] => [word, name]),
  );
  return new Map(found.filter(([word]) => !plain.test(word)));
}

/** A broker and an agent with one of everything that has a secret; what people chose is the same in each. */
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
  // All that holds something of the kind was looked into.
  const kept = ['authority.json', 'identity.json', 'state.json', 'webhooks.key', 'history.db'];
  expect([...new Set(second.values())]).toEqual(expect.arrayContaining(kept));
});

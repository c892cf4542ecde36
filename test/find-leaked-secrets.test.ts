// Tests of the search for leaked secrets, which runs at the end of every test with a broker. It must find secrets in
// all places.
import { mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { giveAway, keepAgentSilent, keepBrokerSilent, overhear } from './find-leaked-secrets.ts';
import { startFarhand, temporaryFolder } from './start-farhand.ts';

const key = `service_apikey_${'k'.repeat(43)}`;

/** Returns a directory with a file that contains a secret, and a function that searches the directory. */
function hushed() {
  const directory = temporaryFolder('hushed');
  const silence = keepBrokerSilent(directory);
  overhear('POST', { asked: {}, status: 201, received: JSON.stringify({ data: { key } }) });
  return { directory, silence };
}

test('a secret is found in a file at any depth, in a name, in bytes of a database, and in a log', () => {
  const { directory, silence } = hushed();
  const path = join(directory, 'output', 'deep');
  mkdirSync(path, { recursive: true });
  const places: [place: string, plant: () => void][] = [
    ['output/deep/x', () => writeFileSync(join(path, 'x'), `before ${key} after`)],
    ['history.db-wal', () => writeFileSync(join(directory, 'history.db-wal'), Buffer.from(`\xff\0${key}\0`))],
    ['the name output', () => writeFileSync(join(path, key.slice('service_apikey_'.length)), '')],
  ];
  for (const [place, plant] of places) {
    plant();
    expect(silence.meanwhile).toThrow(`an API key in ${place}`);
    rmSync(path, { recursive: true });
    rmSync(join(directory, 'history.db-wal'), { force: true });
    mkdirSync(path);
    expect(silence.meanwhile).not.toThrow();
  }
  silence.log.debug({ authorization: `Bearer ${key}` }, 'request');
  expect(silence.afterwards).toThrow('an API key in the broker’s log');
});

test('a secret in an answer is found, unless its request has created the secret', () => {
  const { silence } = hushed();
  expect(silence.meanwhile).not.toThrow();
  overhear('GET', { asked: undefined, status: 200, received: `{"data":["${key}"]}` });
  expect(silence.meanwhile).toThrow('an API key in an answer to GET');
  overhear('POST', { asked: {}, status: 422, received: `{"error":{"message":"not ${key}"}}` });
  expect(silence.afterwards).toThrow('an API key in an answer to POST');
});

test.each([
  ['a join token', { received: `{"token":"farhand_join_${'j'.repeat(43)}.0"}` }, 'j'.repeat(43)],
  ['a ticket', { received: `{"stream_url":"ws://x/y?ticket=${'t'.repeat(43)}"}` }, 't'.repeat(43)],
  ['a webhook’s secret', { asked: { url: 'x', secret: 'whsec_0123456789abcdef' } }, 'whsec_0123456789abcdef'],
])('%s is remembered', (what, passed, secret) => {
  const { directory, silence } = hushed();
  overhear('POST', { asked: {}, status: 201, received: '', ...passed });
  writeFileSync(join(directory, 'state.json.last'), secret);
  expect(silence.afterwards).toThrow(`${what} in state.json.last`);
});

test('the key of a machine is found outside its own file', async () => {
  const system = await startFarhand();
  const { dataDir } = await system.agent();
  const silence = keepAgentSilent(temporaryFolder('elsewhere'));
  silence.log.info(readFileSync(join(dataDir, 'identity.json'), 'utf8').replaceAll('\\n', '\n'));
  expect(silence.afterwards).toThrow('a machine’s key in the agent’s log');
});

test('a secret that a test publishes on purpose is no longer searched for', () => {
  const { directory, silence } = hushed();
  writeFileSync(join(directory, 'x'), key);
  giveAway(key);
  expect(silence.afterwards).not.toThrow();
});

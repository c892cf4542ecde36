// Resolving the names of receivers: the hosts file comes before name servers, and a name without an answer delays no
// other name.
import { createSocket } from 'node:dgram';
import { once } from 'node:events';
import { renameSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { resolveName } from '../broker/deliveries/resolve-host-name.ts';
import { temporaryFolder } from './start-farhand.ts';

/** Starts a name server that answers each query with the code that the test chooses, or not at all. */
async function startNameServer({ hosts = '', answer = (_query: string): number | undefined => undefined }) {
  const server = createSocket('udp4');
  server.on('message', (message, { port, address }) => {
    const code = answer(message.toString('latin1'));
    if (code === undefined) return;
    const reply = Buffer.from(message);
    reply.writeUInt16BE(0x8180 + code, 2);
    server.send(reply, port, address);
  });
  server.bind(0, '127.0.0.1');
  await once(server, 'listening');
  const file = join(temporaryFolder('hosts'), 'hosts');
  writeFileSync(file, hosts);
  const servers = [`127.0.0.1:${server.address().port}`];
  onTestFinished(() => void server.close());
  return { file, resolve: (name: string) => resolveName(name, file, servers) };
}

const noSuchName = 3;

test('a name that neither the hosts file nor a name server knows has no address', async () => {
  const { resolve } = await startNameServer({
    hosts:
      '10.0.0.1 other\n# 10.0.0.2 nowhere.example\n10.0.0.3 # nowhere.example\nnonsense nowhere.example\n',
    answer: () => noSuchName,
  });
  await expect(resolve('nowhere.example')).rejects.toMatchObject({ code: 'ENOTFOUND' });
});

test('a hundred names that no server answers for delay no other name', async () => {
  const { resolve } = await startNameServer({
    hosts: '10.0.0.1 intra.corp\n',
    answer: (query) => (query.includes('healthy') ? noSuchName : undefined),
  });
  const dead = Array.from({ length: 100 }, (_, n) => resolve(`dead${n}.example`).catch(() => undefined));
  const begun = performance.now();
  await expect(resolve('healthy.example')).rejects.toMatchObject({ code: 'ENOTFOUND' });
  expect(await resolve('intra.corp')).toEqual(['10.0.0.1']);
  expect(performance.now() - begun).toBeLessThan(1_500);
  expect(dead).toHaveLength(100);
});

test('all forms of lines in the hosts file are read, also when no name server answers', async () => {
  const { resolve } = await startNameServer({
    hosts: '127.0.0.1\tlocalhost\n  10.0.0.1   Intra.Corp intra  # ours\r\nfd00::1 intra\n\n',
  });
  expect(await resolve('INTRA.corp.')).toEqual(['10.0.0.1']);
  expect(await resolve('intra')).toEqual(['10.0.0.1', 'fd00::1']);
});

test('a changed, replaced or removed hosts file takes effect at once', async () => {
  const { file, resolve } = await startNameServer({ answer: () => noSuchName });
  await expect(resolve('intra')).rejects.toThrow();
  writeFileSync(file, '10.0.0.1 intra\n');
  expect(await resolve('intra')).toEqual(['10.0.0.1']);
  writeFileSync(`${file}.new`, '10.0.0.2 intra\n');
  renameSync(`${file}.new`, file);
  expect(await resolve('intra')).toEqual(['10.0.0.2']);
  rmSync(file);
  await expect(resolve('intra')).rejects.toThrow();
});

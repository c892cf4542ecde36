// The verb farhand-broker doctor with --database-url: what it finds wrong with the database.
import { copyFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { doctor } from '../../broker/doctor.ts';
import { shared } from '../close-after-tests.ts';
import { fakeClock } from '../fake-clock.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { copyOf, createServer, startOn, withPostgres } from './postgres-fixture.ts';

const server = shared(() => createServer());

const examine = (url: string, dataDir = temporaryFolder('broker')) =>
  doctor({ argv: ['--data-dir', dataDir, '--database-url', url], env: {} });

withPostgres('doctor', () => {
  test('names what is wrong with the connection and the database, with exit code 1', async () => {
    const { port, query, createDatabase, url } = await server();
    await query("CREATE ROLE visitor LOGIN PASSWORD 'right-word'");
    await query("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0");
    await createDatabase();
    const cases: [string, RegExp][] = [
      ['postgres://me@127.0.0.1:1/x', /^fail {2}database +.*ECONNREFUSED.*check that the server runs/ms],
      ['mysql://x', /^fail {2}database +--database-url must be/m],
      [`postgres://visitor:wrong@127.0.0.1:${port}/postgres`, /^fail {2}database .*refuses the password/m],
      [url('latin'), /^fail {2}encoding +LATIN1.*createdb --encoding UTF8/ms],
      [
        `postgres://visitor:right-word@127.0.0.1:${port}/postgres`,
        /^fail {2}tables +this user cannot create tables.*owner/ms,
      ],
    ];
    for (const [address, finding] of cases) {
      const { text, code } = await examine(address);
      expect([address, text, code]).toEqual([address, expect.stringMatching(finding), 1]);
      expect(text).not.toContain('right-word');
    }
  });

  test('lists version, durability, size, and the broker that uses the database, with exit code 0', async () => {
    const { dataDir, databaseUrl, broker } = await startOn(await server());
    const { text, code } = await examine(databaseUrl, dataDir);
    expect(code).toBe(0);
    for (const line of [
      /^ok {4}directory +only its owner can use/m,
      /^ok {4}database +postgres:\/\/farhand@\S+\/test_\w+ answers/m,
      /^ok {4}database version +\d+\.\d+/m,
      /^ok {4}encoding +UTF8/m,
      /^ok {4}fsync +on/m,
      /^ok {4}synchronous_commit +on/m,
      /^ok {4}used by +farhand-broker of the same box since 20\S+Z \(pid \d+\)$/m,
      /^ok {4}database size +\d+ kB/m,
      /^ok {4}database clock +agrees/m,
    ])
      expect(text).toMatch(line);
    await broker.close();
    const unused = await examine(databaseUrl, dataDir);
    expect(unused.text).toMatch(/^warn {2}used by +no broker uses the database/m);
  });

  test('lists the brokers that share the database, with their machines and leases', async () => {
    const { createDatabase, query } = await server();
    const url = await createDatabase();
    const flags = ['--database-url', url, '--peer-listen', '127.0.0.1:0'];
    const { agent, dataDir } = await startFarhand({ flags });
    await agent();
    const database = new URL(url).pathname.slice(1);
    // No program listens on port 1.
    await query(
      "INSERT INTO brokers VALUES ('broker_cut', 'https://127.0.0.1:1', now() + interval '1 hour')",
      database,
    );
    await query(
      "INSERT INTO brokers VALUES ('broker_gone', 'https://gone:1', now() - interval '90 s')",
      database,
    );
    const { text, code } = await examine(url, dataDir);
    expect(code).toBe(0);
    expect(text).toMatch(
      /^ok {4}broker_\w+ +https:\S+ \(this machine’s broker\) owns 1 machines, 1 of them linked; its lease ends in (8|9|10) s$/m,
    );
    expect(text).toMatch(
      /^warn {2}broker_cut +https:\/\/127.0.0.1:1 owns 0 .*cannot be reached.*ECONNREFUSED/m,
    );
    expect(text).toMatch(
      /^warn {2}broker_gone +https:\/\/gone:1 owns 0 machines.*its lease ended 9\d s ago/m,
    );
  });

  test('warns of two brokers on copies of one data directory, and both log it', async () => {
    const url = await (await server()).createDatabase();
    const flags = ['--database-url', url, '--peer-listen', '127.0.0.1:0'];
    const one = await startFarhand({ flags });
    const copy = copyOf(one.dataDir);
    copyFileSync(join(one.dataDir, 'directory-id'), join(copy, 'directory-id'));
    const two = await startFarhand({ flags, dataDir: copy });
    const { text } = await examine(url, copy);
    expect(text).toMatch(
      /^warn {2}copied directory +https:\S+ and https:\S+ use copies.*delete directory-id/ms,
    );
    for (const { log } of [one, two])
      await expect.poll(() => log.join('')).toContain('runs on a copy of this data directory');
  });

  test('warns of a server that can lose data, and of a clock that differs', async () => {
    const own = await createServer(['fsync = off', 'synchronous_commit = off']);
    const url = await own.createDatabase();
    fakeClock(Date.now() + 90_000);
    const { text } = await examine(url);
    expect(text).toMatch(/^warn {2}fsync +off: a power failure/m);
    expect(text).toMatch(
      /^ok {4}synchronous_commit +off in the server, but on in the broker’s own transactions/m,
    );
    expect(text).toMatch(/^warn {2}database clock +differs by (8\d|90) s/m);
  });
});

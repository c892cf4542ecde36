// The console's page of the brokers that share a database, with two brokers on a PostgreSQL server.
import { expect, inject } from 'vitest';
import { shared } from '../close-after-tests.ts';
import { copyOf, createServer, databaseOf, withPostgres } from '../postgres/postgres-fixture.ts';
import { startFarhand } from '../start-farhand.ts';
import { browserTest, newLogin, startWithConsole } from './browser.ts';

const server = shared(() => createServer());

browserTest('without other brokers the menu has no page of brokers', async () => {
  const { page, faults, load } = await newLogin(await startWithConsole());
  await load('/brokers');
  await page.getByText('This broker works alone').waitFor();
  expect(await page.getByRole('link', { name: 'Brokers' }).count()).toBe(0);
  expect(faults).toEqual([]);
});

withPostgres('two brokers', () => {
  browserTest('are listed with their machines and leases, and a machine names its owner', async () => {
    const { createDatabase, query } = await server();
    const url = await createDatabase();
    const flags = ['--database-url', url, '--peer-listen', '127.0.0.1:0'];
    const one = await startWithConsole(flags);
    const tuning = { console: inject('consoleFolder') };
    const two = await startFarhand({ flags, tuning, dataDir: copyOf(one.dataDir) });
    const { machineId } = await two.agent();
    const { page, faults, load } = await newLogin(one);
    await load('/machines');
    await page.getByRole('link', { name: 'Brokers' }).click();
    const own = page.getByRole('row', { name: /this broker online 0 0 valid/ });
    await own.waitFor();
    const other = page.getByRole('row', { name: /online 1 1 valid/ });
    const address = (await other.getByRole('cell').first().textContent())?.trim() ?? '';
    await load(`/machines/${machineId}`);
    await page.getByText(address, { exact: true }).waitFor();
    await two.broker.close();
    await query(
      `INSERT INTO brokers VALUES ('broker_gone', 'https://gone:1', now() - interval '90 s')`,
      databaseOf(url),
    );
    await load('/brokers');
    await page.getByRole('row', { name: /https:\/\/gone:1 offline 0 0 ended/ }).waitFor();
    await page.getByRole('row', { name: /this broker online 1 / }).waitFor();
    // The page of the machine asks for the machine's status while no broker owns the machine.
    expect(faults.filter((fault) => !fault.includes('status of 503'))).toEqual([]);
  });
});

// The console's pages while machines join.
import { expect } from 'vitest';
import { shared } from '../close-after-tests.ts';
import { connectScripted, joinScripted } from '../scripted-agent.ts';
import { browserTest, newLogin, setVisibility, startWithConsole } from './browser.ts';

const broker = shared(startWithConsole);

browserTest('the page for joining reports the machine within 2 s after its hello', async () => {
  const system = await broker();
  const { page, open, faults } = await newLogin(system);
  await open('/join');
  await page.getByLabel('Name', { exact: true }).fill('web 7');
  await page.getByRole('button', { name: 'Show the line to paste' }).click();
  await page.getByText('Waiting for the machine').waitFor();
  // This broker has no packages, so the page displays options for the agent in place of a command that installs it.
  await page.getByText("--join-token-file token.txt --name 'web 7'").waitFor();
  const token = (await page.locator('.secret pre').textContent()) ?? '';
  const enrolment = { grpc: system.grpc, joinToken: () => Promise.resolve(token) };
  const agent = await connectScripted(system.grpc, await joinScripted(enrolment, 'fresh-1'));
  await agent.next('welcome');
  await page.getByText('fresh-1 has joined').waitFor({ timeout: 2_000 });
  await page.getByRole('link', { name: 'Open fresh-1' }).click();
  await page.getByRole('heading', { name: 'fresh-1', level: 1 }).waitFor();
  expect(faults).toEqual([]);
});

browserTest('the page for joining reports a machine that joined while its tab was hidden', async () => {
  const system = await broker();
  const { page, open, faults } = await newLogin(system);
  await open('/join');
  await page.getByRole('button', { name: 'Show the line to paste' }).click();
  await page.getByText('Waiting for the machine').waitFor();
  const streamEnded = page.waitForEvent('requestfailed', (request) => request.url().includes('/live'));
  await page.evaluate(setVisibility('hidden'));
  await streamEnded;
  await joinScripted(system, 'hidden-1');
  await page.evaluate(setVisibility('visible'));
  await page.getByText('hidden-1 has joined').waitFor();
  expect(faults).toEqual([]);
});

// Login to the console with a key and with a link. The browser stores neither of them afterwards.
import { expect } from 'vitest';
import { withSocket } from '../../broker/cli/call-or-start-local-broker.ts';
import { shared } from '../close-after-tests.ts';
import { fakeClock } from '../fake-clock.ts';
import { browserTest, logIn, newLogin, newWindow, oneMachine, startWithConsole } from './browser.ts';

const broker = shared(startWithConsole);

browserTest('a wrong key is refused with a reason, and the field stays', async () => {
  const system = await broker();
  const window = await newWindow(system);
  await window.open('/commands');
  await window.page.getByLabel('API key').fill('service_apikey_wrong');
  await window.page.getByRole('button', { name: 'Log in' }).click();
  expect(await window.page.getByRole('alert').textContent()).toContain('does not know this key');
  expect(await window.page.getByLabel('API key').inputValue()).toBe('service_apikey_wrong');
  await window.page.getByLabel('API key').fill('service_apikey two words');
  await window.page.getByRole('button', { name: 'Log in' }).click();
  await window.page.getByText('remove spaces').waitFor();
  expect(window.faults).toEqual([]);
});

browserTest('a key logs in, and is then in no storage, address, history or page', async () => {
  const system = await broker();
  const window = await newWindow(system);
  const printed: string[] = [];
  window.page.on('console', (message) => printed.push(message.text()));
  await logIn(window, system.key);
  const stored = await window.page.evaluate<string>(
    'JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie, location.href, history.state])',
  );
  const page = await window.page.content();
  for (const text of [stored, page, ...printed]) expect(text).not.toContain(system.key);
  const [cookie] = await window.context.cookies();
  expect(cookie).toMatchObject({ name: '__Host-farhand', httpOnly: true, secure: true, sameSite: 'Strict' });
  expect(window.faults).toEqual([]);
});

browserTest('the link of npm start logs in, and its ticket is gone before the first request', async () => {
  const system = await broker();
  const { id } = await system.client.keys.me();
  const { ticket } = await withSocket(system.dataDir, (_client, post) =>
    post<{ ticket: string }>(`/local/login-tickets/${id}`),
  );
  const window = await newWindow(system);
  const addresses: string[] = [];
  window.page.on('request', () => addresses.push(window.page.url()));
  await window.open(`/machines#ticket=${ticket}`);
  await window.page.getByRole('heading', { name: 'Machines', level: 1 }).waitFor();
  expect(window.page.url()).toBe(`${system.url}/console/machines`);
  const ofApi = addresses.slice(1).filter((address) => address.includes('ticket'));
  // While the address still has the ticket, only the script and the style may be requested. Before they arrive, no
  // script can remove the ticket.
  expect(ofApi.length).toBeLessThanOrEqual(2);
  await window.page.goBack();
  expect(window.page.url()).not.toContain(ticket);
});

browserTest('a revoked key ends the login, and the page asks for another', async () => {
  const system = await broker();
  const { id, key } = await system.client.keys.create({ name: 'short', scopes: ['admin'] });
  const window = await newWindow(system);
  await logIn(window, key);
  await system.client.keys.remove({ key_id: id });
  await window.page.getByText('Your login has ended').waitFor();
  await window.page.getByLabel('API key').fill(system.key);
  await window.page.getByRole('button', { name: 'Log in' }).click();
  // After the new login, the same page is still open, and its live updates continue: it lists the new machine.
  await system.agent({ name: 'web-1' });
  await window.page.getByRole('link', { name: 'web-1' }).waitFor();
});

browserTest('creating a key 15 minutes after login needs the API key again, and then succeeds', async () => {
  const clock = fakeClock(Date.parse('2026-11-23T10:00:00Z'));
  const system = await startWithConsole();
  const { page, open, faults } = await newLogin(system);
  await open('/keys');
  const create = async (name: string): Promise<void> => {
    await page.getByRole('button', { name: 'New key' }).click();
    await page.getByRole('textbox', { name: 'Name' }).fill(name);
    await page.keyboard.press('Control+Enter');
  };
  await create('first');
  await page.getByRole('dialog', { name: 'The key first' }).getByRole('button', { name: 'Done' }).click();
  await clock.advance(15 * 60_000);
  await create('second');
  const again = page.getByRole('dialog', { name: 'Enter your API key again' });
  await again.getByLabel('API key').fill('service_apikey_wrong');
  await page.keyboard.press('Enter');
  await again.getByRole('alert').waitFor();
  await again.getByLabel('API key').fill(system.key);
  await page.keyboard.press('Enter');
  await page.getByRole('dialog', { name: 'The key second' }).waitFor();
  const names = (await system.client.keys.list()).items.map(({ name }) => name);
  expect(names.filter((name) => name !== 'test').sort()).toEqual(['first', 'second']);
  expect(faults).toEqual([]);
});

browserTest('a request that is not confirmed is refused with the reason', async () => {
  const clock = fakeClock(Date.parse('2026-11-23T10:00:00Z'));
  const system = await startWithConsole();
  const { page, open } = await newLogin(system);
  await open('/join');
  await clock.advance(15 * 60_000);
  await page.getByRole('button', { name: 'Show the line to paste' }).click();
  const again = page.getByRole('dialog', { name: 'Enter your API key again' });
  await again.getByRole('button', { name: 'Cancel' }).click();
  await page.getByRole('alert').getByText('needs the API key again').waitFor();
  expect((await system.client.joinTokens.list()).total).toBe(0);
});

browserTest('logging out ends the login', async () => {
  const system = await broker();
  const before = (await system.client.logins.list()).total;
  const { page } = await newLogin(system);
  await page.getByRole('button', { name: 'Log out' }).click();
  await page.getByLabel('API key').waitFor();
  expect((await system.client.logins.list()).total).toBe(before);
});

browserTest('a key sees only the pages that it may use', async () => {
  const system = await broker();
  const { key } = await system.keyed(['machines:read']);
  const window = await newWindow(system);
  await logIn(window, key);
  const links = await window.page
    .getByRole('navigation', { name: 'Pages' })
    .getByRole('link')
    .allTextContents();
  expect(links).toEqual(['Machines', 'Inventory', 'Upgrades', 'Alerts', 'Events']);
  await window.open('/keys');
  await window.page.getByText('needs the scope admin').waitFor();
});

browserTest('a form whose scope the key lacks names that scope, also if its address is opened', async () => {
  const { system, machine } = await oneMachine();
  const { id: schedule } = await system.client.schedules.create({
    ...{ name: 'nightly', machine_id: machine, command: 'true', cron: '@daily' },
  });
  const { id: saved } = await system.client.savedCommands.create({ name: 'uptime', argv: ['uptime'] });
  const { key } = await system.keyed(['machines:read', 'commands:read', 'schedules:read', 'schedules:write']);
  const { page, faults, open } = await newLogin(system, { key });
  for (const [path, scope] of [
    ['/schedules/new', 'commands:execute'],
    [`/schedules/${schedule}/settings`, 'commands:execute'],
    ['/saved-commands/new', 'commands:execute'],
    [`/saved-commands/${saved}/edit`, 'commands:execute'],
    ['/upgrades/new', 'machines:write'],
    [`/alerts/windows?machine=${machine}`, 'webhooks:write'],
    ['/alerts/channels', 'webhooks:read'],
    [`/machines/${machine}/terminals`, 'sessions:read'],
    [`/machines/${machine}/files`, 'files:read'],
  ] as const) {
    await open(path);
    await page.getByText(`This needs the scope ${scope}.`).waitFor();
    expect(await page.getByRole('textbox').count(), path).toBe(0);
  }
  expect(faults).toEqual([]);
});

browserTest('buttons disappear when a refusal shows that the key has lost their scope', async () => {
  const system = await startWithConsole();
  await system.client.alertRules.create({ name: 'memory', kind: 'memory', above: 90, for: 0 });
  const { key, id: key_id } = await system.client.keys.create({
    name: 'limited soon',
    scopes: ['machines:read', 'webhooks:read', 'webhooks:write'],
  });
  const { page, faults, open } = await newLogin(system, { key });
  await open('/alerts/rules');
  await page.getByRole('button', { name: 'New rule' }).waitFor();
  await system.client.keys.update({ key_id, scopes: ['machines:read'] });
  await page.getByRole('button', { name: 'Turn off memory' }).click();
  await page.getByRole('button', { name: 'New rule' }).waitFor({ state: 'detached' });
  expect(await page.getByRole('button', { name: 'Turn off memory' }).count()).toBe(0);
  const menu = page.getByRole('navigation', { name: 'Pages' });
  expect(await menu.getByRole('link', { name: 'Webhooks' }).count()).toBe(0);
  expect(faults).toEqual([]);
});

browserTest('the menu lists the pages of a scope that the key got while a page was open', async () => {
  const system = await startWithConsole();
  const { key, id: key_id } = await system.client.keys.create({
    name: 'more soon',
    scopes: ['machines:read'],
  });
  const { page, faults } = await newLogin(system, { key });
  // A machine that appears by itself shows that the page has its live updates.
  await system.agent({ name: 'web-1' });
  await page.getByRole('link', { name: 'web-1' }).waitFor();
  await system.client.keys.update({ key_id, scopes: ['machines:read', 'commands:read'] });
  const menu = page.getByRole('navigation', { name: 'Pages' });
  await menu.getByRole('link', { name: 'Events' }).click();
  await menu.getByRole('link', { name: 'Commands', exact: true }).click();
  await page.getByRole('heading', { name: 'Commands', level: 1 }).waitFor();
  expect(faults).toEqual([]);
});

browserTest('an answer about the rights of a key that arrives after a logout is ignored', async () => {
  const system = await startWithConsole();
  const { key, id: key_id } = await system.client.keys.create({
    name: 'limited soon',
    scopes: ['machines:read', 'webhooks:read', 'webhooks:write'],
  });
  await system.client.alertRules.create({ name: 'disk', kind: 'memory', above: 90, for: 0 });
  const { page, faults, open } = await newLogin(system, { key });
  await open('/alerts/rules');
  await page.getByRole('button', { name: 'Turn off disk' }).waitFor();
  await system.client.keys.update({ key_id, scopes: ['machines:read'] });
  const [asked, loggedOut] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
  await page.route('**/auth/me', async (route) => {
    // The broker answers before the logout, and the answer arrives after it. Playwright sends no secure cookie over
    // http, so it sends the key.
    const response = await route.fetch({ headers: { authorization: `Bearer ${key}` } });
    asked.resolve();
    await loggedOut.promise;
    await route.fulfill({ response });
  });
  await page.getByRole('button', { name: 'Turn off disk' }).click();
  await asked.promise;
  await page.getByRole('button', { name: 'Log out' }).click();
  await page.getByLabel('API key').waitFor();
  const answer = page.waitForResponse('**/auth/me');
  loggedOut.resolve();
  await (await answer).finished();
  // The page has used the answer, and has drawn what follows from it.
  await page.evaluate(`fetch('/console/').then((response) => response.text())
    .then(() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn))))`);
  expect(await page.getByText('Log in with an API key.').count()).toBe(1);
  expect(faults).toEqual([]);
});

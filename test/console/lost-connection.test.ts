// The banner about a lost connection disappears when the broker answers again, whatever the key may read.
import {
  browserTest,
  type ConsolePage,
  newCookie,
  newWindowWith,
  oneMachine,
  restart,
  startWithConsole,
} from './browser.ts';

const banner = ({ page }: ConsolePage) => page.getByText('The page may be out of date');

browserTest('the banner disappears on a page without live updates too', async () => {
  const system = await startWithConsole();
  const { key } = await system.keyed(['commands:read']);
  const window = await newWindowWith(await newCookie(system, key), system);
  await window.load('/commands');
  await system.broker.close();
  await banner(window).waitFor();
  await window.page.locator('.who').click();
  await window.page.getByRole('heading', { name: 'Profile', level: 1 }).waitFor();
  await banner(window).waitFor();
  await restart(system);
  await banner(window).waitFor({ state: 'detached' });
});

browserTest('the banner disappears if the key may no longer follow the page', async () => {
  const { system, machine } = await oneMachine();
  const { key, id: key_id } = await system.client.keys.create({
    ...{ name: 'limited soon', scopes: ['machines:read', 'commands:read'], machine_ids: [machine] },
  });
  const { id } = await system.client.commands.async({ machine_id: machine, command: 'sleep 600' });
  const window = await newWindowWith(await newCookie(system, key), system);
  let isBlocked = true;
  await window.page.route('**/api/v1/live**', (route) => (isBlocked ? route.abort() : route.continue()));
  await window.load(`/commands/${id}`);
  await banner(window).waitFor();
  const { machineId: other } = await system.agent({ name: 'db-1' });
  await system.client.keys.update({ key_id, machine_ids: [other] });
  isBlocked = false;
  await banner(window).waitFor({ state: 'detached' });
  await window.page.getByText('This data may be out of date').waitFor();
});

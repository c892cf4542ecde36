// The console's terminals: typed text is echoed, and markup in the output is displayed as text.
import { expect } from 'vitest';
import { browserTest, newLogin, oneMachine, type Page } from './browser.ts';

const screen = (page: Page) => page.locator('.xterm-rows');

browserTest('a terminal echoes, displays colours despite the policy, and says how it ended', async () => {
  const { system, machine } = await oneMachine();
  const { page, faults, open } = await newLogin(system);
  await open(`/machines/${machine}/terminals`);
  await page.getByRole('button', { name: 'Open a terminal' }).click();
  await page.getByText('connected').waitFor();
  await page.keyboard.type(String.raw`printf '\033[38;2;200;30;30m%s\033[0m\n' col'ou'red`);
  await page.keyboard.press('Enter');
  await screen(page).getByText('coloured', { exact: true }).waitFor();
  // If the policy blocked xterm's styles, all text would have the colour of the page.
  await expect
    .poll(() => screen(page).getByText('coloured', { exact: true }).getAttribute('style'))
    .toMatch(/color: ?(#|rgb)/);
  await page.keyboard.type('exit 3');
  await page.keyboard.press('Enter');
  await page.getByText('The session has ended (exit code 3).').waitFor();
  expect(faults).toEqual([]);
});

browserTest('markup in output and titles is text, and a second window watches', async () => {
  const { system, machine } = await oneMachine();
  const { page, faults, open } = await newLogin(system);
  await open(`/machines/${machine}/terminals`);
  await page.getByRole('button', { name: 'Open a terminal' }).click();
  await page.getByText('connected').waitFor();
  const other = await newLogin(system);
  await expect.poll(() => page.url()).toMatch(/sess_/);
  await other.page.goto(`${page.url()}?observe`);
  await other.page.getByText('only watching').waitFor();
  await page.keyboard.type(
    String.raw`printf '\033]0;<img src=x onerror=alert(1)>\007<script>%s</script>\n' hostile`,
  );
  await page.keyboard.press('Enter');
  for (const one of [page, other.page]) await screen(one).getByText('<script>hostile</script>').waitFor();
  expect(await page.locator('main img').count()).toBe(0);
  expect([...faults, ...other.faults]).toEqual([]);
});

browserTest('text that no single key produces can be typed, and screen readers get the output', async () => {
  const { system, machine } = await oneMachine();
  const { page, faults, open } = await newLogin(system);
  const { session_id } = await system.client.sessions.create({ machine_id: machine });
  await open(`/machines/${machine}/terminals/${session_id}`);
  await page.getByText('connected').waitFor();
  await page.keyboard.type('printf %s ');
  await page.keyboard.insertText('é');
  await page.keyboard.type(' | od -An -tx1');
  await page.keyboard.press('Enter');
  await screen(page).getByText('c3 a9').waitFor();
  await page.getByRole('button', { name: 'For screen readers' }).click();
  await page.getByRole('list').getByText('c3 a9').waitFor();
  expect(faults).toEqual([]);
});

browserTest(
  'a terminal answers a query of a program once, and not again when it is opened again',
  async () => {
    const { system, machine } = await oneMachine();
    const { page, faults, open } = await newLogin(system);
    const { session_id } = await system.client.sessions.create({ machine_id: machine, shell: '/bin/bash' });
    await open(`/machines/${machine}/terminals/${session_id}`);
    await page.getByText('connected').waitFor();
    await page.keyboard.type(String.raw`printf '\033[>c'; read -rsd c answer; echo "length-${'$'}{#answer}"`);
    await page.keyboard.press('Enter');
    await screen(page)
      .getByText(/^length-\d+$/)
      .waitFor();
    await page.reload();
    await screen(page)
      .getByText(/^length-\d+$/)
      .waitFor();
    await page.keyboard.type('echo typed-$((1+1))');
    await page.keyboard.press('Enter');
    await screen(page).getByText('typed-2', { exact: true }).waitFor();
    expect(await screen(page).textContent()).not.toContain('276;0c');
    expect(faults).toEqual([]);
  },
);

browserTest('a terminal that opens late does not replace the page to which the user has gone', async () => {
  const { system, machine } = await oneMachine();
  const { page, faults, open } = await newLogin(system);
  await open(`/machines/${machine}/terminals`);
  const left = Promise.withResolvers<void>();
  await page.route('**/api/v1/sessions', async (route) => {
    if (route.request().method() === 'POST') await left.promise;
    await route.continue();
  });
  await page.getByRole('button', { name: /^(Open a|New) terminal$/ }).click();
  await page.getByRole('link', { name: 'Run', exact: true }).first().click();
  await page.getByRole('textbox', { name: 'Command' }).fill('halt');
  const opened = page.waitForResponse(
    (response) => response.url().endsWith('/sessions') && response.request().method() === 'POST',
  );
  left.resolve();
  await (await opened).finished();
  // The page has used the answer, and has drawn what follows from it.
  await page.evaluate(`fetch('/console/').then((response) => response.text())
    .then(() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn))))`);
  expect(await page.getByRole('textbox', { name: 'Command' }).inputValue()).toBe('halt');
  expect(faults).toEqual([]);
});

browserTest('Ctrl C stops a program that writes faster than the page draws', async () => {
  const { system, machine } = await oneMachine();
  const { page, faults, open } = await newLogin(system);
  const { session_id } = await system.client.sessions.create({ machine_id: machine, shell: '/bin/sh' });
  await open(`/machines/${machine}/terminals/${session_id}`);
  await page.getByText('connected').waitFor();
  await page.keyboard.type('yes');
  await page.keyboard.press('Enter');
  // Without a limit on unacknowledged output, some 20 MB would be waiting after this second.
  await page.waitForTimeout(1_000);
  await page.keyboard.press('Control+c');
  await page.keyboard.type("echo the-'end'");
  await page.keyboard.press('Enter');
  await screen(page).getByText('the-end', { exact: true }).waitFor({ timeout: 10_000 });
  expect(faults).toEqual([]);
});

browserTest('a page that comes back after too much output goes on with the latest', async () => {
  const { system, machine } = await oneMachine();
  const { page, faults, open } = await newLogin(system);
  const { session_id } = await system.client.sessions.create({ machine_id: machine, shell: '/bin/sh' });
  await page.addInitScript({
    content: `const Native = WebSocket;
    window.WebSocket = class extends Native { constructor(...given) { super(...given); window.socket = this; } };`,
  });
  await open(`/machines/${machine}/terminals/${session_id}`);
  await page.getByText('connected').waitFor();
  const written = Promise.withResolvers<void>();
  await page.route('**/attach', async (route) => {
    await written.promise;
    await route.continue();
  });
  await page.evaluate('socket.close()');
  const other = await system.client.sessions.terminal(await system.client.sessions.attach({ session_id }));
  await other.write("head -c 3000000 /dev/zero | tr '\\0' x; echo; echo the-'end'\n");
  let last = '';
  for await (const bytes of other.output) {
    last = (last + Buffer.from(bytes).toString()).slice(-100);
    if (last.includes('the-end\r\n')) break;
  }
  written.resolve();
  await screen(page).getByText('the-end', { exact: true }).waitFor();
  await page.keyboard.type('echo typed-$((1+1))');
  await page.keyboard.press('Enter');
  await screen(page).getByText('typed-2', { exact: true }).waitFor();
  other.detach();
  expect(faults).toEqual([]);
});

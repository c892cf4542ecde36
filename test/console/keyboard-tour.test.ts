// Uses the whole console by keyboard alone, with names full of markup. Afterwards no secret may be stored in the
// browser.
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect } from 'vitest';
import { temporaryFolder } from '../start-farhand.ts';
import {
  browserTest,
  type ConsolePage,
  newWindow,
  type Page,
  startMachine,
  startWithConsole,
  traces,
} from './browser.ts';

/** Number of presses of Tab after which a test gives up. */
const mostTabs = 80;
/** Markup and control characters: bell, escape, right-to-left override, and the start of a title sequence. */
const hostile = '\u0007\u001b]0;x\u202e<img src=x onerror=alert(1)>';

/** Returns the accessible name of the focused element. */
const focused = (page: Page): Promise<string> =>
  page.evaluate<string>(`(() => {
    const at = document.activeElement;
    return (at.getAttribute('aria-label') ?? at.labels?.[0]?.textContent ?? at.textContent).trim();
  })()`);

/** Presses a key, by default Tab, until an element with this name is focused. */
async function tabTo({ page }: ConsolePage, name: string | RegExp, key = 'Tab'): Promise<void> {
  const passed: string[] = [];
  for (let tabs = 0; tabs < mostTabs; tabs += 1) {
    const now = await focused(page);
    if (typeof name === 'string' ? now === name : name.test(now)) return;
    passed.push(now.slice(0, 30));
    await page.keyboard.press(key);
  }
  throw new Error(`${key} does not lead to ${name}, but to ${passed.join(' | ')}`);
}

async function choose(window: ConsolePage, name: string | RegExp, key?: string): Promise<void> {
  await tabTo(window, name, key);
  await window.page.keyboard.press('Enter');
}

async function type({ page }: ConsolePage, text: string, key = 'Enter'): Promise<void> {
  await page.keyboard.type(text);
  await page.keyboard.press(key);
}

const heading = ({ page }: ConsolePage, name: string | RegExp): Promise<void> =>
  page.getByRole('heading', { name, level: 1 }).waitFor();

/** Opens the search dialog and types a text into it. */
async function find({ page }: ConsolePage, text: string, key = 'Control+k'): Promise<void> {
  await page.keyboard.press(key);
  await page.getByRole('dialog', { name: 'Search' }).waitFor();
  await page.keyboard.type(text);
}

async function visitMachine(window: ConsolePage, name: string): Promise<void> {
  await find(window, name);
  await window.page.getByRole('option', { name: new RegExp(name) }).waitFor();
  await window.page.keyboard.press('Enter');
  await heading(window, name);
}

async function editFile(window: ConsolePage, folder: string, file: string): Promise<void> {
  const { page } = window;
  await choose(window, 'Files');
  await choose(window, 'Type a path');
  await page.locator('input[aria-label="Path"]:focus').waitFor();
  await page.keyboard.press('Control+a');
  await type(window, folder);
  await page.getByRole('button', { name: file, exact: true }).waitFor();
  await choose(window, file);
  await page.locator('.cm-content:focus').waitFor();
  await tabTo(window, `Content of ${file}`);
  await page.keyboard.press('Control+End');
  await type(window, 'b: 2', 'Control+s');
  await page.getByText(`${file} is saved`).waitFor();
  expect(readFileSync(join(folder, file), 'utf8')).toBe('a: 1\nb: 2');
  // In the editor Tab indents. After Escape it moves the focus again.
  await page.keyboard.press('Escape');
  await choose(window, 'Back', 'Shift+Tab');
  // The page displays the name as text, with its control characters visible.
  await page.getByText('<img src=x onerror=alert(1)>').first().waitFor();
}

async function useTerminal(window: ConsolePage): Promise<void> {
  const { page } = window;
  await choose(window, 'Terminals');
  await page.getByRole('button', { name: 'Open a terminal' }).waitFor();
  await choose(window, 'Open a terminal');
  await page.getByText('connected').waitFor();
  await type(window, String.raw`printf '\033]0;<img src=x onerror=alert(2)>\007<i>%s</i>\n' ty'p'ed`);
  await page.locator('.xterm-rows').getByText('<i>typed</i>').waitFor();
}

async function runAndCancel(window: ConsolePage): Promise<void> {
  const { page } = window;
  // A terminal passes nearly every key to the shell. Ctrl+Shift+K moves the focus out of it.
  await find(window, 'Run', 'Control+Shift+K');
  await page.keyboard.press('Enter');
  await heading(window, 'Run a command');
  for (const name of ['web-1', 'web-2']) {
    await tabTo(window, 'Add a machine', 'Shift+Tab');
    await page.keyboard.type(name);
    await page.getByRole('option', { name: new RegExp(name) }).waitFor();
    await page.keyboard.press('Enter');
    await page.getByRole('button', { name: `Deselect ${name}` }).waitFor();
  }
  // Two elements are named "Command": first a choice, and then the field. The test needs the field.
  await tabTo(window, 'Command');
  await page.keyboard.press('Tab');
  await tabTo(window, 'Command');
  await type(window, "echo '<b>out</b>'; sleep 600", 'Control+Enter');
  await heading(window, 'Batch');
  await page.getByText('<b>out</b>').nth(2).waitFor();
  await choose(window, 'web-2');
  await heading(window, 'Command');
  await page.getByRole('button', { name: 'Cancel' }).waitFor();
  await choose(window, 'Cancel');
  await page.getByRole('dialog').waitFor();
  await choose(window, 'Cancel the command');
  await page.getByText('cancelled').first().waitFor();
}

/** Creates a key and a join token. Resolves with their secrets, as the page displays them. */
async function createSecrets(window: ConsolePage): Promise<string[]> {
  const { page } = window;
  await page.keyboard.press('g');
  await page.keyboard.press('k');
  await heading(window, 'API keys');
  await choose(window, 'New key');
  await page.getByRole('dialog', { name: 'New API key' }).waitFor();
  await type(window, '<img src=x onerror=alert(4)>', 'Control+Enter');
  await page.getByText('Copy it now').waitFor();
  const key = (await page.locator('.secret pre').textContent()) ?? '';
  await choose(window, 'Done');
  await page.getByRole('dialog').waitFor({ state: 'detached' });
  await page.keyboard.press('g');
  await page.keyboard.press('j');
  await heading(window, 'Join a machine');
  await tabTo(window, 'Name');
  await page.keyboard.press('Control+Enter');
  await page.getByText('Waiting for the machine').waitFor();
  const token = /farhand_join_\w+/.exec((await page.locator('.secret pre').textContent()) ?? '')?.[0] ?? '';
  return [key, token];
}

browserTest('everything works by keyboard alone, and leaves no secret behind', async () => {
  const system = await startWithConsole();
  await startMachine(system, 'web-1', '<b onmouseover=alert(3)>x</b>');
  await startMachine(system, 'web-2');
  const folder = temporaryFolder('files');
  writeFileSync(join(folder, 'app.yaml'), 'a: 1\n');
  writeFileSync(join(folder, hostile.replaceAll('/', '')), 'x');
  const window = await newWindow(system);
  const { page } = window;
  const printed: string[] = [];
  const secrets: string[] = [system.key];
  page.on('console', (message) => printed.push(message.text()));
  page.on('websocket', (socket) => secrets.push(new URL(socket.url()).searchParams.get('ticket') ?? ''));
  await window.open('/machines');
  await page.getByLabel('API key').waitFor();
  await type(window, system.key);
  await heading(window, 'Machines');
  const [cookie] = await window.context.cookies();
  secrets.push(cookie?.value ?? '');
  await visitMachine(window, 'web-1');
  await editFile(window, folder, 'app.yaml');
  await useTerminal(window);
  await runAndCancel(window);
  secrets.push(...(await createSecrets(window)));
  await choose(window, 'Log out', 'Shift+Tab');
  await page.getByLabel('API key').waitFor();
  expect(secrets.map((secret) => secret.length > 20)).toEqual(Array(5).fill(true));
  for (const text of [await traces(window), ...printed])
    for (const secret of secrets) expect(text.includes(secret)).toBe(false);
  expect(window.faults).toEqual([]);
});

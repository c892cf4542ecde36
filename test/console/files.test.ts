// The console's file browser: uploads, names that look like markup, and a file that two people edit.
import { chmodSync, mkdirSync, readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import type { Page } from 'playwright-core';
import { expect } from 'vitest';
import { temporaryFolder } from '../start-farhand.ts';
import { browserTest, newFolderPage, newLogin, oneMachine } from './browser.ts';

browserTest('uploads arrive, and replacing a file is asked for first', async () => {
  const folder = temporaryFolder('files');
  writeFileSync(join(folder, 'b.txt'), 'old');
  const { page, faults } = await newFolderPage(folder);
  await page.getByRole('button', { name: 'b.txt', exact: true }).waitFor();
  const files = ['a.txt', 'b.txt'].map((name) => ({
    name,
    mimeType: 'text/plain',
    buffer: Buffer.from('new'),
  }));
  await page.getByLabel('Files to upload').setInputFiles(files);
  expect(readFileSync(join(folder, 'b.txt'), 'utf8')).toBe('old');
  await page.getByRole('button', { name: 'Replace', exact: true }).click();
  await page.getByText('2 uploaded').waitFor();
  expect(['a.txt', 'b.txt'].map((name) => readFileSync(join(folder, name), 'utf8'))).toEqual(['new', 'new']);
  expect(faults).toEqual([]);
});

browserTest('a large folder is listed a thousand entries at a time', async () => {
  const folder = temporaryFolder('many');
  for (let n = 0; n < 2_001; n += 1) writeFileSync(join(folder, `${n}`), '');
  const { page, faults } = await newFolderPage(folder);
  const more = page.getByRole('button', { name: 'More', exact: true });
  await page.getByText('1,000 of 2,001').waitFor();
  await more.click();
  await page.getByText('2,000 of 2,001').waitFor();
  await more.click();
  await more.waitFor({ state: 'detached' });
  await page.getByRole('button', { name: '999', exact: true }).waitFor();
  expect(faults).toEqual([]);
});

browserTest('names of files are text, whatever they contain', async () => {
  const folder = temporaryFolder('files');
  mkdirSync(join(folder, '<img src=x onerror=alert(1)>'));
  writeFileSync(join(folder, '<img src=x onerror=alert(1)>', '"><script>alert(2)<'), 'x');
  const { page, faults } = await newFolderPage(folder);
  await page.getByRole('button', { name: '<img src=x onerror=alert(1)>', exact: true }).click();
  await page.getByRole('button', { name: '"><script>alert(2)<', exact: true }).waitFor();
  expect(await page.locator('main img, main script').count()).toBe(0);
  expect(faults).toEqual([]);
});

browserTest('a copied file keeps a name that is not UTF-8', async () => {
  const folder = temporaryFolder('files');
  mkdirSync(join(folder, 'there'));
  const name = Buffer.from([0x61, 0xff]);
  writeFileSync(Buffer.concat([Buffer.from(`${folder}/`), name]), 'x');
  const { page, faults } = await newFolderPage(folder);
  await page.getByRole('button', { name: /^Copy or move a/ }).click();
  await page.getByLabel('Folder there').fill(join(folder, 'there'));
  await page.getByRole('button', { name: 'Copy', exact: true }).last().click();
  await page.getByText('1 entries copied').waitFor();
  expect(readdirSync(join(folder, 'there'), { encoding: 'buffer' })).toEqual([name]);
  expect(faults).toEqual([]);
});

browserTest('a change of permissions of several files sets only the values that were changed', async () => {
  const folder = temporaryFolder('files');
  const modes = { 'a.txt': 0o600, 'b.txt': 0o755 };
  for (const [name, mode] of Object.entries(modes)) {
    writeFileSync(join(folder, name), 'x');
    chmodSync(join(folder, name), mode);
  }
  const modeOf = (name: string): number => statSync(join(folder, name)).mode & 0o7777;
  const { page, faults } = await newFolderPage(folder);
  const dialog = page.getByRole('dialog', { name: 'Permissions of 2 entries' });
  const editPermissions = async (): Promise<void> => {
    for (const name of Object.keys(modes)) await page.getByLabel(`Select ${name}`).check();
    await page.getByRole('button', { name: 'Permissions', exact: true }).click();
    await dialog.getByText('A field is empty if its value differs between the entries.').waitFor();
  };
  await editPermissions();
  expect(await dialog.getByLabel('In octal').inputValue()).toBe('');
  const group = dialog.getByRole('textbox', { name: 'Group' });
  expect(await group.inputValue()).not.toBe('');
  await group.fill(String(statSync(folder).gid));
  await dialog.getByRole('button', { name: 'Save' }).click();
  await dialog.waitFor({ state: 'detached' });
  expect(Object.keys(modes).map(modeOf)).toEqual([0o600, 0o755]);
  await page.reload();
  await editPermissions();
  await dialog.getByLabel('In octal').fill('0600');
  await dialog.getByRole('button', { name: 'Save' }).click();
  await dialog.waitFor({ state: 'detached' });
  expect(Object.keys(modes).map(modeOf)).toEqual([0o600, 0o600]);
  expect(faults).toEqual([]);
});

browserTest('a file that somebody else saved is not replaced before the difference was read', async () => {
  const folder = temporaryFolder('files');
  const file = join(folder, 'app.yaml');
  writeFileSync(file, 'port: 80\r\nname: x\r\n');
  const { page, faults } = await newFolderPage(folder);
  await page.getByRole('button', { name: 'app.yaml', exact: true }).click();
  await page.locator('.cm-content').click();
  await page.keyboard.press('Control+End');
  await page.keyboard.type('mine: 1');
  await page.keyboard.press('Control+s');
  await page.getByText('app.yaml is saved').waitFor();
  expect(readFileSync(file, 'utf8')).toBe('port: 80\r\nname: x\r\nmine: 1');
  writeFileSync(file, 'port: 81\r\n');
  await page.keyboard.type('23');
  await page.keyboard.press('Control+s');
  const conflict = page.getByRole('alert', { name: 'Somebody else saved this file' });
  await conflict.getByText('- port: 81').waitFor();
  await conflict.getByText('+ mine: 123').waitFor();
  expect(readFileSync(file, 'utf8')).toBe('port: 81\r\n');
  await conflict.getByRole('button', { name: 'Replace it with mine' }).click();
  await conflict.waitFor({ state: 'detached' });
  expect(readFileSync(file, 'utf8')).toBe('port: 80\r\nname: x\r\nmine: 123');
  expect(faults).toEqual([]);
});

/** Appends " two" to app.yaml and saves it. Saves reach the broker only after the returned function is called. */
async function beginSave(page: Page): Promise<() => void> {
  const saves = Promise.withResolvers<void>();
  await page.route('**/files/content', async (route) => {
    await saves.promise;
    await route.continue();
  });
  await page.getByRole('button', { name: 'app.yaml', exact: true }).click();
  await page.locator('.cm-content').click();
  await page.keyboard.press('Control+End');
  await page.keyboard.type(' two');
  await page.keyboard.press('Control+s');
  return () => saves.resolve();
}

browserTest('two saves at once are no conflict, and the file has the last text', async () => {
  const folder = temporaryFolder('files');
  const file = join(folder, 'app.yaml');
  writeFileSync(file, 'one');
  const { page, faults } = await newFolderPage(folder);
  const answers: number[] = [];
  page.on('response', (response) => {
    if (response.url().endsWith('/files/content')) answers.push(response.status());
  });
  const letSavesPass = await beginSave(page);
  await page.keyboard.type('!');
  await page.keyboard.press('Control+s');
  letSavesPass();
  await expect.poll(() => answers.length).toBe(2);
  expect(answers).toEqual([200, 200]);
  await page.getByText('not saved').waitFor({ state: 'detached' });
  expect(readFileSync(file, 'utf8')).toBe('one two!');
  expect(faults).toEqual([]);
});

browserTest(
  'the editor asks before an unsaved text is left, also one that was typed during a save',
  async () => {
    const folder = temporaryFolder('files');
    const file = join(folder, 'app.yaml');
    writeFileSync(file, 'one');
    const { page, faults } = await newFolderPage(folder);
    const letSavesPass = await beginSave(page);
    await page.keyboard.type(' three');
    letSavesPass();
    await page.getByText('app.yaml is saved').waitFor();
    expect(readFileSync(file, 'utf8')).toBe('one two');
    await page.getByText('not saved').waitFor();

    const question = page.getByRole('dialog', { name: 'Leave without saving?' });
    const stay = question.getByRole('button', { name: 'Cancel' });
    await page.getByRole('link', { name: 'Commands' }).last().click();
    await question.waitFor();
    await stay.click();
    await page.goBack();
    await question.waitFor();
    await stay.click();
    await page.getByRole('button', { name: 'Search' }).first().click();
    await page.keyboard.type('log out');
    await page.keyboard.press('Enter');
    await question.waitFor();
    await stay.click();
    await page.locator('.cm-content').click();
    await page.keyboard.press('Control+s');
    await expect.poll(() => readFileSync(file, 'utf8')).toBe('one two three');
    await page.getByText('not saved').waitFor({ state: 'detached' });
    await page.keyboard.type('!');
    await page.getByRole('button', { name: 'Back' }).click();
    await question.getByRole('button', { name: 'Leave' }).click();
    await page.locator('.drop-zone').waitFor();
    expect(readFileSync(file, 'utf8')).toBe('one two three');
    expect(faults).toEqual([]);
  },
);

/** Opens a.txt with the text "one", appends " two", and ends the login before the text is saved. */
async function endLoginWhileEditing() {
  const { system, machine } = await oneMachine();
  const folder = temporaryFolder('files');
  const file = join(folder, 'a.txt');
  writeFileSync(file, 'one');
  const { key, id: key_id } = await system.client.keys.create({ name: 'editor', scopes: ['admin'] });
  const { page, open, faults } = await newLogin(system, { key });
  await open(`/machines/${machine}/files?path=${folder}&edit=${file}`);
  await page.locator('.cm-content').click();
  await page.keyboard.press('Control+End');
  await page.keyboard.type(' two');
  await page.getByText('not saved').waitFor();
  const { items } = await system.client.logins.list({ key_id });
  for (const { id } of items) await system.client.logins.remove({ login_id: id });
  await page.getByText('Your login has ended').waitFor();
  const logInAgain = async (as: string): Promise<void> => {
    await page.getByLabel('API key').fill(as);
    await page.getByRole('button', { name: 'Log in' }).click();
    await page.locator('.cm-content').waitFor();
  };
  return { system, page, file, key, faults, logInAgain };
}

browserTest(
  'a text that was not saved when the login ended is still in the editor after the next login',
  async () => {
    const { page, file, key, faults, logInAgain } = await endLoginWhileEditing();
    await logInAgain(key);
    await page.getByText('not saved').waitFor();
    await page.locator('.cm-content').getByText('one two').click();
    await page.keyboard.press('Control+s');
    await page.getByText('a.txt is saved').waitFor();
    expect(readFileSync(file, 'utf8')).toBe('one two');
    expect(faults).toEqual([]);
  },
);

browserTest('a text that was not saved is not displayed after a login with another key', async () => {
  const { system, page, faults, logInAgain } = await endLoginWhileEditing();
  await logInAgain(system.key);
  await page.locator('.cm-content').getByText('one', { exact: true }).waitFor();
  expect(await page.getByText('not saved').count()).toBe(0);
  expect(faults).toEqual([]);
});

browserTest(
  'Back and Forward ask before an unsaved text is left, and both still work after Cancel',
  async () => {
    const folder = temporaryFolder('files');
    writeFileSync(join(folder, 'a.txt'), 'one');
    const { page, faults } = await newFolderPage(folder);
    const question = page.getByRole('dialog', { name: 'Leave without saving?' });
    const answer = async (name: 'Cancel' | 'Leave'): Promise<void> => {
      await question.getByRole('button', { name }).click();
      await question.waitFor({ state: 'detached' });
    };
    const editor = page.locator('.cm-content');
    await page.getByRole('button', { name: 'a.txt', exact: true }).click();
    await editor.waitFor();
    await page.getByRole('link', { name: 'Events', exact: true }).click();
    await page.getByRole('heading', { name: 'Events', level: 1 }).waitFor();
    await page.goBack();
    await editor.click();
    await page.keyboard.type('two ');
    await page.getByText('not saved').waitFor();
    const address = page.url();
    await page.goBack();
    await answer('Cancel');
    await expect.poll(() => page.url()).toBe(address);
    await page.goForward();
    await answer('Cancel');
    await expect.poll(() => page.url()).toBe(address);
    await page.goForward();
    await answer('Leave');
    await page.getByRole('heading', { name: 'Events', level: 1 }).waitFor();
    await page.goBack();
    await editor.click();
    await page.keyboard.type('three ');
    await page.getByText('not saved').waitFor();
    await page.goBack();
    await answer('Leave');
    await page.locator('.drop-zone').waitFor();
    await page.goForward();
    await editor.getByText('one', { exact: true }).waitFor();
    expect(faults).toEqual([]);
  },
);

browserTest(
  'a step in the browser history from one edited file to another displays the content of the other one',
  async () => {
    const folder = temporaryFolder('files');
    for (const name of ['a.txt', 'b.txt']) writeFileSync(join(folder, name), `content of ${name}`);
    const { page, faults } = await newFolderPage(folder);
    const editor = page.locator('.cm-content');
    await page.getByRole('button', { name: 'a.txt', exact: true }).click();
    await editor.getByText('content of a.txt').waitFor();
    await page.getByRole('link', { name: 'Activity' }).click();
    await page.getByRole('link', { name: 'Files' }).click();
    await page.getByRole('button', { name: 'Type a path' }).click();
    await page.locator('.path-bar input').fill(folder);
    await page.keyboard.press('Enter');
    await page.getByRole('button', { name: 'b.txt', exact: true }).click();
    await editor.getByText('content of b.txt').waitFor();
    // As from the menu of the button Back.
    await page.evaluate('history.go(-4)');
    await editor.getByText('content of a.txt').waitFor();
    expect(faults).toEqual([]);
  },
);

browserTest('Back asks before an unsaved text is left, also to an entry of a part of the page', async () => {
  const folder = temporaryFolder('files');
  writeFileSync(join(folder, 'a.txt'), 'one');
  const { page, faults } = await newFolderPage(folder);
  const question = page.getByRole('dialog', { name: 'Leave without saving?' });
  const ofFolder = page.url();
  await page.evaluate(`new Promise((resolve) => {
    addEventListener('popstate', resolve, { once: true });
    location.hash = '#content';
  })`);
  await page.getByRole('button', { name: 'a.txt', exact: true }).click();
  await page.locator('.cm-content').click();
  await page.keyboard.type('two ');
  await page.getByText('not saved').waitFor();
  const address = page.url();
  await page.goBack();
  await question.getByRole('button', { name: 'Cancel' }).click();
  await expect.poll(() => page.url()).toBe(address);
  await page.goBack();
  await question.getByRole('button', { name: 'Leave' }).click();
  await expect.poll(() => page.url()).toBe(`${ofFolder}#content`);
  await page.locator('.drop-zone').waitFor();
  await page.goBack();
  await expect.poll(() => page.url()).toBe(ofFolder);
  // Forward to the entry of the part, and from there to the editor, which has the text of the file again.
  await page.goForward();
  await expect.poll(() => page.url()).toBe(`${ofFolder}#content`);
  await page.goForward();
  await page.locator('.cm-content').getByText('one', { exact: true }).click();
  await page.keyboard.type('three ');
  await page.getByText('not saved').waitFor();
  await page.goBack();
  await question.waitFor();
  expect(faults).toEqual([]);
});

// The code in docs/webhooks.md and the example receiver verify deliveries of a real broker.
import { spawn, spawnSync } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { expect, onTestFinished, test } from 'vitest';
import { has } from './skip-without-programs.ts';
import { temporaryFolder } from './start-farhand.ts';
import { type Received, startReceiver, startWebhookSystem } from './webhook-receivers.ts';

const root = join(import.meta.dirname, '..');
const secret = 'a "secret" with $igns ~ and \\';

/** Returns the code for a language in docs/webhooks.md. */
function recipe(language: string): string {
  const chapter = readFileSync(join(root, 'docs/webhooks.md'), 'utf8');
  const code = new RegExp(`\`\`\`${language}\n([^]*?)\`\`\``).exec(chapter)?.[1];
  if (!code) throw new Error(`the chapter has no recipe in ${language}`);
  return code;
}

/** Returns the body and the signature header of a real delivery. */
async function delivered(): Promise<{ body: Buffer; header: string }> {
  const system = await startWebhookSystem();
  const receiver = await startReceiver();
  await system.client.webhooks.create({ url: receiver.url, events: ['machine.*'], secret });
  await system.happen('machine.online', { text: 'Grüße\u2028🚀' });
  const [{ body, headers }] = (await receiver.heard(1)) as [Received];
  return { body, header: String(headers['x-service-signature']) };
}

/** Runs a program with a body and a header, and returns its output. The body is passed unchanged. */
function says(command: string, args: string[], body: Buffer, header: string): string {
  const { stdout, stderr } = spawnSync(command, [...args, header, secret], { input: body, encoding: 'utf8' });
  return stdout.trim() || stderr;
}

test.for([
  [
    'Node',
    'js',
    'recipe.mjs',
    process.execPath,
    "\nimport { readFileSync } from 'node:fs';\nconsole.log(isGenuine(readFileSync(0), ...process.argv.slice(2)) ? 'genuine' : 'forged');",
  ],
  [
    'Python',
    'python',
    'recipe.py',
    'python3',
    "\nimport sys\nprint('genuine' if is_genuine(sys.stdin.buffer.read(), *sys.argv[1:]) else 'forged')",
  ],
])(
  'the recipe in %s knows what is genuine and what is not',
  async ([what = '', language = '', name = '', command = '', use = ''], { skip }) => {
    if (command !== process.execPath && !has(command)) skip(`${what} is not installed: needs ${command}`);
    const file = join(temporaryFolder('recipe'), name);
    writeFileSync(file, `${recipe(language)}${use}\n`);
    const { body, header } = await delivered();
    const ask = (bytes: Buffer, signature: string) => says(command, [file], bytes, signature);
    expect(ask(body, header)).toBe('genuine');
    expect(ask(Buffer.concat([body, Buffer.from(' ')]), header)).toBe('forged');
    expect(ask(body, '')).toBe('forged');
    expect(ask(body, `${header.slice(0, -1)}é`)).toBe('forged');
    expect(ask(body, header.toUpperCase())).toBe('forged');
  },
);

test('the example receiver accepts signed deliveries and refuses others', async () => {
  const system = await startWebhookSystem();
  const child = spawn(process.execPath, [join(root, 'scripts/examples/receiver.ts'), '0'], {
    env: { ...process.env, SECRET: secret },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  onTestFinished(() => void child.kill());
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  const line = async (): Promise<string> => String((await lines.next()).value);
  const url = /http\S+/.exec(await line())?.[0] ?? '';
  const signed = await system.client.webhooks.create({ url, events: ['machine.online'], secret });
  // The name has no line break, because the output is read line by line.
  await system.happen('machine.online', { n: 1 }, { id: 'mach_1', name: 'web' });
  expect(await line()).toMatch(/^new machine\.online evt_\w+ .*"n":1/);
  const { items } = await system.client.webhooks.deliveries({ webhook_id: signed.id });
  const { id: delivery_id } = items[0]!;
  await system.client.webhooks.redeliver({ webhook_id: signed.id, delivery_id });
  expect(await line()).toMatch(/^again machine\.online/);
  const forged = await system.client.webhooks.create({ url, events: ['*'], secret: 'another' });
  const result = await system.client.webhooks.test({ webhook_id: forged.id });
  expect(result).toMatchObject({ delivered: false, status_code: 401 });
});

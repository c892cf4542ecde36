// Programs in TypeScript of the README and of docs/, as they stand there: they are type-checked and run against a real broker.
import { execFile, spawn } from 'node:child_process';
import { mkdirSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { promisify } from 'node:util';
import type { Command } from 'commander';
import { expect, onTestFinished, test, vi } from 'vitest';
import { createProgram } from '../broker/cli/program.ts';
import { temporaryFolder } from './house.ts';
import { openToldHouse } from './receivers.ts';

const root = join(import.meta.dirname, '..');

/** The blocks of TypeScript of a page between two headings, in order. */
function blocks(page: string, from: string, to = 'the end'): string[] {
  const text = `\n${readFileSync(join(root, page), 'utf8')}`;
  const chapter = text.split(`\n${from}\n`)[1]?.split(`\n${to}\n`)[0] ?? '';
  const found = [...chapter.matchAll(/```ts\n(.*?)```/gs)].map(([, code = '']) => code);
  if (found.length === 0) throw new Error(`no TypeScript in ${page} between ${from} and ${to}`);
  return found;
}

/** A project that has installed us. */
function project(): string {
  const folder = temporaryFolder('readme');
  mkdirSync(join(folder, 'node_modules/@xterm'), { recursive: true });
  symlinkSync(root, join(folder, 'node_modules/farhand'));
  for (const name of ['@types', '@xterm/headless']) {
    symlinkSync(join(root, 'node_modules', name), join(folder, 'node_modules', name));
  }
  writeFileSync(join(folder, 'package.json'), '{"type":"module"}');
  const settings = { extends: join(root, 'tsconfig.json'), include: ['*.ts'] };
  writeFileSync(join(folder, 'tsconfig.json'), JSON.stringify(settings));
  return folder;
}

const prelude = `import headless from '@xterm/headless';
const client = new Farhand({ baseUrl: process.env.FARHAND_URL ?? '', apiKey: process.env.FARHAND_API_KEY });
const machine_id = process.env.M ?? '';
const term = new headless.Terminal({ allowProposedApi: true, cols: 100, rows: 30 });
const prompt = term.onWriteParsed(() => {
  prompt.dispose();
  term.input('exit 7\\r');
});
`;

test('its programs are well typed, run, and do what they say', async () => {
  const house = await openToldHouse();
  const { machineId } = await house.agent({ name: 'web-1', tags: 'demo' });
  const folder = project();
  const port = await freePort();
  writeFileSync(join(folder, 'ca.pem'), await house.client.service.ca());
  const programs = {
    'sdk.ts': blocks('README.md', '## From TypeScript', '### A terminal')
      .join('\n')
      .replace('listen(9000', `listen(${port}`),
    'terminal.ts': [
      "import { Farhand } from 'farhand';\n",
      prelude,
      ...blocks('README.md', '### A terminal', '## Everything else'),
      'console.log(terminal.cols, ending);',
    ].join(''),
    'grpc.ts': blocks('docs/grpc.md', '# gRPC').join('\n').replace('127.0.0.1:8421', house.grpc),
  };
  for (const [name, code] of Object.entries(programs)) writeFileSync(join(folder, name), code);
  const env = {
    PATH: process.env.PATH,
    FARHAND_URL: house.url,
    FARHAND_API_KEY: house.key,
    KEY: house.key,
    M: machineId,
  };
  const start = (name: string) => {
    const child = spawn(process.execPath, [name], { cwd: folder, env, stdio: ['ignore', 'pipe', 'inherit'] });
    onTestFinished(() => void child.kill('SIGKILL'));
    return { child, said: text(child.stdout) };
  };
  const [sdk, terminal, grpc] = [start('sdk.ts'), start('terminal.ts'), start('grpc.ts')];
  // The last thing that it does is to listen.
  const { id } = await house.client.webhooks.create({
    url: `http://127.0.0.1:${port}/`,
    events: ['*'],
    secret: 'for both of us',
    enabled: false,
  });
  await vi.waitFor(
    async () => expect((await house.client.webhooks.test({ webhook_id: id })).status_code).toBe(200),
    { timeout: 25_000, interval: 100 },
  );
  await house.client.webhooks.update({ webhook_id: id, secret: 'another' });
  expect((await house.client.webhooks.test({ webhook_id: id })).status_code).toBe(401);
  sdk.child.kill('SIGTERM');
  const said = await sdk.said;
  for (const line of [
    /^web-1 (\d+\.\d+ ){3}/m,
    /^1 of 1$/m,
    /^output one$/m,
    /^output two$/m,
    /^exit /m,
    /^command\.completed cmd_/m,
    /^\d+ [0-9a-f]{64}$/m,
    /^file_not_found 404 /m,
    /^test \{/m,
  ]) {
    expect(said).toMatch(line);
  }
  expect(readFileSync(join(folder, 'os-release'))).toEqual(readFileSync('/etc/os-release'));
  expect(await terminal.said).toMatch(/^100 \{[^}]*why: 'ended'[^}]*exit_code: 7/m);
  expect(await grpc.said).toMatch(/(\d+\.\d+ ){3}.*\ncompleted 0\n$/);
  await promisify(execFile)(join(root, 'node_modules/.bin/tsc'), ['-p', folder, '--noEmit']).catch(
    (error: { stdout: string }) => expect.fail(error.stdout),
  );
}, 60_000);

/** Calls of our programs in the lines of shell of a page, but for what a command of `exec` has. */
function callsIn(page: string): { program: string; words: string[] }[] {
  const shell = [...readFileSync(join(root, page), 'utf8').matchAll(/```sh\n(.*?)```/gs)];
  const lines = shell.flatMap(([, code = '']) => code.split(/\n|&&/));
  return lines.flatMap((line) => {
    const [, program, rest = ''] =
      /^ *(?:sudo )?(farhand(?:-agent|-broker)?) (.*?)(?: -- .*| +#.*)?$/.exec(line) ?? [];
    return program ? [{ program, words: rest.split(/ +/) }] : [];
  });
}

const isFlag = (word: string): boolean => word.startsWith('--');

test('its lines of shell, and those of docs/, call verbs and flags that there are', async () => {
  const help = async (main: string): Promise<string> =>
    (await promisify(execFile)(process.execPath, [join(root, main), 'install', '--help'])).stdout;
  const [tree, agent, broker] = await Promise.all([
    createProgram(),
    help('agent/main.ts'),
    help('broker/main.ts'),
  ]);
  const services = `${agent}${broker} --yes --purge --keep-data `;
  const calls = ['README.md', 'docs/install.md', 'docs/broker.md'].flatMap(callsIn);
  expect(calls.length).toBeGreaterThan(12);
  for (const { program, words } of calls) {
    if (program !== 'farhand') {
      expect(['install', 'status', 'uninstall', 'doctor']).toContain(words[0]);
      for (const flag of words.filter(isFlag)) expect(services).toContain(` ${flag} `);
      continue;
    }
    let verb: Command | undefined = tree;
    for (const word of words) {
      if (!verb?.commands.length) break;
      verb = verb.commands.find((one) => one.name() === word);
    }
    const known = verb?.options.map(({ long }) => long);
    expect([words.join(' '), known]).toEqual([words.join(' '), expect.arrayContaining(words.filter(isFlag))]);
  }
});

async function freePort(): Promise<number> {
  const { createServer } = await import('node:net');
  const server = createServer().listen(0, '127.0.0.1');
  await new Promise((resolve) => server.once('listening', resolve));
  const address = server.address();
  await new Promise((resolve) => server.close(resolve));
  return typeof address === 'object' && address ? address.port : 0;
}

test('the table of libraries names every one that is installed with us', () => {
  const { dependencies, optionalDependencies } = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8'));
  const chapter = readFileSync(join(root, 'README.md'), 'utf8').split('\n## Libraries')[1] ?? '';
  const named = chapter
    .split('\n')
    .filter((row) => row.startsWith('|'))
    .flatMap((row) => row.split(/[|,;\s()]+/));
  const installed = Object.keys({ ...dependencies, ...optionalDependencies });
  expect(installed.filter((name) => !named.includes(name))).toEqual([]);
});

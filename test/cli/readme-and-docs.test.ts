// The README and the pages of docs/: their programs and shell commands run, their links work, and their tables are
// correct.
import { execFile, spawn } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { text } from 'node:stream/consumers';
import { promisify } from 'node:util';
import type { Command } from 'commander';
import { expect, onTestFinished, test } from 'vitest';
import { requiredCapabilities } from '../../agent/capabilities-by-rpc.ts';
import { createProgram } from '../../broker/cli/verb-tree.ts';
import { api } from '../../shared/api/route-table.ts';
import { codes } from '../../shared/errors.ts';
import { severalProgramsMs } from '../cli-fixture.ts';
import { freePort } from '../find-free-ports.ts';
import { needs } from '../skip-without-programs.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';
import { startWebhookSystem } from '../webhook-receivers.ts';

const root = join(import.meta.dirname, '../..');
const read = (page: string): string => readFileSync(join(root, page), 'utf8');
const guides = ['README.md', ...readdirSync(join(root, 'docs')).map((name) => `docs/${name}`)].filter(
  (page) => page.endsWith('.md'),
);
const pages = [...guides, 'CONTRIBUTING.md', 'SECURITY.md', 'CHANGELOG.md'];

/** Returns the code blocks of a page between two headings, in order. */
function blocks(page: string, fence: string, from?: string, to = 'the end'): string[] {
  const whole = `\n${read(page)}`;
  const part = from === undefined ? whole : (whole.split(`\n${from}\n`)[1] ?? '');
  const found = [...(part.split(`\n${to}\n`)[0] ?? '').matchAll(/^```(.*)\n([\s\S]*?)^```$/gm)];
  return found.filter(([, language]) => language === fence).map(([, , code = '']) => code);
}

// ---- Programs in TypeScript

/** Makes a project that has the package installed. */
function project(): string {
  const folder = temporaryFolder('docs');
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

const terminalPrelude = `import { Farhand } from 'farhand';
import headless from '@xterm/headless';
const client = new Farhand({ baseUrl: process.env.FARHAND_URL ?? '', apiKey: process.env.FARHAND_API_KEY });
const machine_id = process.env.M ?? '';
const term = new headless.Terminal({ allowProposedApi: true, cols: 100, rows: 30 });
const prompt = term.onWriteParsed(() => {
  prompt.dispose();
  term.input('exit 7\\r');
});
`;

test('the TypeScript programs pass the type check, run, and do what the page says', {
  timeout: severalProgramsMs,
}, async () => {
  const system = await startWebhookSystem();
  const { machineId } = await system.agent({ name: 'web-1', tags: 'demo' });
  const folder = project();
  const port = await freePort();
  writeFileSync(join(folder, 'ca.pem'), await system.client.service.ca());
  const terminalChapter = blocks('docs/sdk.md', 'ts', '## A terminal');
  const programs = {
    'readme.ts': blocks('README.md', 'ts').join('\n').replace('http://127.0.0.1:8420', system.url),
    'sdk.ts': blocks('docs/sdk.md', 'ts', '# TypeScript SDK', '## A terminal')
      .join('\n')
      .replace('listen(9000', `listen(${port}`),
    'terminal.ts': [terminalPrelude, ...terminalChapter, 'console.log(terminal.cols, ending);'].join('\n'),
    'grpc.ts': blocks('docs/grpc.md', 'ts').join('\n').replace('127.0.0.1:8421', system.grpc),
  };
  for (const [name, code] of Object.entries(programs)) writeFileSync(join(folder, name), code);
  const env = {
    PATH: process.env.PATH,
    FARHAND_URL: system.url,
    FARHAND_API_KEY: system.key,
    KEY: system.key,
    M: machineId,
  };
  const start = (name: string) => {
    const child = spawn(process.execPath, [name], { cwd: folder, env, stdio: ['ignore', 'pipe', 'inherit'] });
    onTestFinished(() => void child.kill('SIGKILL'));
    return { child, output: text(child.stdout) };
  };
  const [readme, sdk, terminal, grpc] = ['readme.ts', 'sdk.ts', 'terminal.ts', 'grpc.ts'].map(start) as [
    ReturnType<typeof start>,
    ReturnType<typeof start>,
    ReturnType<typeof start>,
    ReturnType<typeof start>,
  ];
  // The program stays open as a server, so the test now sends events to it.
  const { id } = await system.client.webhooks.create({
    url: `http://127.0.0.1:${port}/`,
    events: ['*'],
    secret: 'for both of us',
    enabled: false,
  });
  await waitFor(
    async () => expect((await system.client.webhooks.test({ webhook_id: id })).status_code).toBe(200),
    { interval: 100 },
  );
  await system.client.webhooks.update({ webhook_id: id, secret: 'another' });
  expect((await system.client.webhooks.test({ webhook_id: id })).status_code).toBe(401);
  sdk.child.kill('SIGTERM');
  const output = await sdk.output;
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
    expect(output).toMatch(line);
  }
  expect(readFileSync(join(folder, 'os-release'))).toEqual(readFileSync('/etc/os-release'));
  expect(await readme.output).toBe('web-1 online\n');
  expect(await terminal.output).toMatch(/^100 \{[^}]*why: 'ended'[^}]*exit_code: 7/m);
  expect(await grpc.output).toMatch(/(\d+\.\d+ ){3}.*\ncompleted 0\n$/);
  await promisify(execFile)(join(root, 'node_modules/.bin/tsc'), ['-p', folder, '--noEmit']).catch(
    (error: { stdout: string }) => expect.fail(error.stdout),
  );
});

// ---- Shell commands

/** Records each failed call of curl in the file `failures`. In a pipe, the exit code of curl would be lost. */
const shellPrelude = `curl() { command curl --fail-with-body "$@" || echo "curl $*" >> failures; }
api() { curl -sS -w '\\n' -H "Authorization: Bearer $KEY" -H 'Content-Type: application/json' "$@"; }
`;

needs('curl', 'tar')('the shell blocks marked "run" succeed, in the order of their page', async () => {
  const system = await startFarhand();
  const { machineId } = await system.agent({ name: 'laptop' });
  const folder = temporaryFolder('docs');
  const env = { PATH: process.env.PATH, KEY: system.key, API: `${system.url}/api/v1`, M: machineId };
  const outputs = new Map<string, string>();
  for (const page of guides) {
    const code = blocks(page, 'sh run').join('\n').replaceAll('/tmp/farhand', join(folder, 'files'));
    if (code === '') continue;
    const { stdout } = await promisify(execFile)('sh', ['-c', shellPrelude + code], { cwd: folder, env });
    const failures = join(folder, 'failures');
    expect([page, existsSync(failures) && readFileSync(failures, 'utf8')]).toEqual([page, false]);
    outputs.set(page, stdout);
  }
  expect(outputs.get('README.md')).toContain('"stdout":"Linux ');
  const tour = outputs.get('docs/rest.md') ?? '';
  for (const part of ['"status":"timeout"', '\n1\n2\n3\n', 'event: exit', '"name":"my-first"']) {
    expect(tour).toContain(part);
  }
});

/**
 * Returns the calls of Farhand's programs in the shell blocks of a page. Leaves out the commands that `farhand exec`
 * runs on machines.
 */
function callsIn(page: string): { program: string; words: string[] }[] {
  const lines = ['sh', 'sh run']
    .flatMap((fence) => blocks(page, fence))
    .join('\n')
    .replaceAll(/ *\\\n */g, ' ')
    .split(/\n|&&/);
  return lines.flatMap((line) => {
    const [, program, rest = ''] =
      /^ *(?:sudo (?:-u \S+ )?)?(farhand(?:-agent|-broker)?) (.*?)(?: -- .*| +#.*)?$/.exec(line) ?? [];
    return program ? [{ program, words: rest.split(/ +/) }] : [];
  });
}

const isFlag = (word: string): boolean => word.startsWith('--');

test('every shell block calls verbs and flags that exist', async () => {
  const help = async (main: string, ...verb: string[]): Promise<string> =>
    (await promisify(execFile)(process.execPath, [join(root, main), ...verb, '--help'])).stdout;
  const [tree, ...helps] = await Promise.all([
    createProgram(),
    help('agent/main.ts', 'install'),
    help('broker/main.ts', 'install'),
    help('broker/main.ts', 'migrate'),
    help('broker/main.ts', 'cluster', 'join'),
    help('broker/main.ts'),
  ]);
  const services = `${helps.join('')} --yes --purge --keep-data `;
  const calls = guides.flatMap(callsIn);
  expect(calls.length).toBeGreaterThan(25);
  for (const { program, words } of calls) {
    if (program !== 'farhand') {
      // Without a verb, farhand-agent and farhand-broker start.
      const verbs = ['install', 'status', 'uninstall', 'doctor', 'migrate', 'cluster', 'trust-key'];
      if (!isFlag(words[0] ?? '')) expect(verbs).toContain(words[0]);
      for (const flag of words.filter(isFlag)) expect(services).toContain(` ${flag.replace('--no-', '--')} `);
      continue;
    }
    let verb: Command | undefined = tree;
    for (const word of words) {
      if (!verb?.commands.length) break;
      verb = verb.commands.find((one) => one.name() === word);
    }
    const options = verb?.options.map(({ long }) => long);
    expect([words.join(' '), options]).toEqual([
      words.join(' '),
      expect.arrayContaining(words.filter(isFlag)),
    ]);
  }
});

test('every message of the programs names verbs of farhand that exist', async () => {
  const tree = await createProgram();
  const sources = ['agent', 'broker', 'shared'].flatMap((folder) =>
    readdirSync(join(root, folder), { recursive: true, encoding: 'utf8' })
      .filter((name) => /\.(?:tsx?|sh)$/.test(name))
      .map((name) => `${folder}/${name}`),
  );
  const named = sources.flatMap((path) => {
    const code = read(path).replaceAll(/^\s*(?:\/\/|\/?\*|#).*$/gm, '');
    return [...code.matchAll(/\bfarhand ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?/g)].map((found) => ({
      path,
      found,
    }));
  });
  expect(named.length).toBeGreaterThan(50);
  const wrong = named.filter(({ found: [, noun, verb] }) => {
    const command = tree.commands.find((one) => one.name() === noun);
    const verbs = command?.commands.map((one) => one.name()) ?? [];
    return !command || (verb !== undefined && verbs.length > 0 && !verbs.includes(verb));
  });
  expect(wrong.map(({ path, found: [text] }) => `${path}: ${text}`)).toEqual([]);
});

// ---- Tables and links

test('the error codes of docs/rest.md are those of the API, each with its status', () => {
  const rows = [...read('docs/rest.md').matchAll(/^\| (\d{3}) \| `(\w+)` \| .+ \| (\w+) \|$/gm)];
  const table = Object.fromEntries(rows.map(([, status, code = '']) => [code, Number(status)]));
  expect(table).toEqual(codes);
  for (const [row, , , retry] of rows)
    expect([row, ['no', 'later', 'now'].includes(retry ?? '')]).toEqual([row, true]);
});

test('the table of libraries names every one that is installed with the package', () => {
  const { dependencies, optionalDependencies } = JSON.parse(read('package.json'));
  const chapter = read('docs/architecture.md').split('\n## Libraries\n')[1]?.split('\n### ')[0] ?? '';
  const names = chapter
    .split('\n')
    .filter((row) => row.startsWith('|'))
    .flatMap((row) => row.split(/[|,;\s()]+/));
  const installed = Object.keys({ ...dependencies, ...optionalDependencies });
  expect(installed.filter((name) => !names.includes(name))).toEqual([]);
});

test('the comment of each rpc in agent.proto names the capability that the agent checks', () => {
  const rpcs = [
    ...read('proto/farhand/agent/v1/agent.proto').matchAll(
      /^ {2}\/\/ Needs the capability (.*)\.\n {2}rpc (\w+)\(/gm,
    ),
  ];
  expect(Object.fromEntries(rpcs.map(([, names = '', rpc]) => [rpc, names.split(' or ')]))).toEqual(
    requiredCapabilities,
  );
});

test('the state diagrams of docs/architecture.md name every state of the API', () => {
  const statuses = (schema: { shape: { status: { options: readonly string[] } } }) =>
    schema.shape.status.options;
  const diagrams = {
    Commands: statuses(api.commands.get.reply),
    Sessions: statuses(api.sessions.get.reply),
    'Schedule runs': statuses(api.schedules.getRun.reply),
    Deliveries: statuses(api.webhooks.deliveries.reply),
  };
  for (const [heading, states] of Object.entries(diagrams)) {
    const [diagram = ''] = blocks('docs/architecture.md', 'mermaid', `### ${heading}`);
    const named = [...diagram.matchAll(/^ {2}(\S+) --> ([^\s:]+)/gm)].flatMap(([, from, to]) => [from, to]);
    const drawn = new Set(named.filter((state) => state !== '[*]'));
    expect([heading, drawn]).toEqual([heading, new Set(states)]);
  }
});

/** Returns the anchor that GitHub gives a heading. */
const anchorOf = (heading: string): string =>
  heading
    .toLowerCase()
    .replaceAll(/[^\p{L}\p{N}\s_-]/gu, '')
    .replaceAll(' ', '-');

test('every link between pages leads to a file and a heading', () => {
  const broken = pages.flatMap((page) => {
    const links = read(page)
      .replaceAll(/^```[\s\S]*?^```$/gm, '')
      .matchAll(/\]\((?!https?:)([^)#]*)#?([^)]*)\)/g);
    return [...links].flatMap(([link, path, anchor]) => {
      const target = path === '' ? page : join(dirname(page), path ?? '');
      if (!existsSync(join(root, target))) return [`${page}: ${link}`];
      const headings = [...(anchor ? read(target) : '').matchAll(/^#+ (.*)$/gm)];
      const found = !anchor || headings.some(([, heading = '']) => anchorOf(heading) === anchor);
      return found ? [] : [`${page}: ${link}`];
    });
  });
  expect(broken).toEqual([]);
});

/** Files that exist only in examples of CONTRIBUTING.md. */
const invented = new Set(['agent/users.ts', 'broker/users/', 'shared/api/users.ts', 'test/users.test.ts']);

test('every file and folder of the repository that a page names exists', () => {
  const missing = pages
    .filter((page) => page !== 'CHANGELOG.md')
    .flatMap((page) =>
      [...read(page).matchAll(/`((?:agent|broker|proto|scripts|shared|test|\.ci)\/[\w./-]*)/g)]
        .map(([, path = '']) => path)
        .filter((path) => !existsSync(join(root, path)) && !invented.has(path))
        .map((path) => `${page}: ${path}`),
    );
  expect(missing).toEqual([]);
});

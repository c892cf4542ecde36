// Creates docs/recording.svg, the animated terminal in the README, by running real commands against three agents.
// Usage: node scripts/terminal-recording.ts
import { type ChildProcess, execFile, spawn } from 'node:child_process';
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { promisify } from 'node:util';

const root = join(import.meta.dirname, '..');
const target = join(root, 'docs/recording.svg');
const startMs = 30_000;

/** The recorded commands. `farhand` is the CLI of this checkout; /tmp/site stands for a temporary directory. */
const typed = [
  'farhand machines list',
  "farhand exec --tag web -- 'uname -sr; nproc'",
  'farhand files put site web-1:/tmp/site',
  'farhand files ls web-1:/tmp/site',
  "farhand exec db-1 -- 'exit 3'; echo $?",
];
const machines = [
  ['web-1', 'web'],
  ['web-2', 'web'],
  ['db-1', 'db'],
] as const;

// ---- Running the commands

const children: ChildProcess[] = [];

function start(main: string, args: string[], env: NodeJS.ProcessEnv = {}): void {
  const options = { env: { ...process.env, ...env }, stdio: ['ignore', 'ignore', 'inherit'] as const };
  children.push(
    spawn(process.execPath, [join(root, main), ...args, '--log-level', 'error'], {
      ...options,
      stdio: [...options.stdio],
    }),
  );
}

async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1');
  await new Promise((resolve) => server.once('listening', resolve));
  const address = server.address();
  await new Promise((resolve) => server.close(resolve));
  return typeof address === 'object' && address ? address.port : 0;
}

/** Repeats a call until it succeeds. Rejects after `startMs` milliseconds. */
async function eventually<T>(call: () => Promise<T>): Promise<T> {
  const deadline = Date.now() + startMs;
  for (;;) {
    try {
      return await call();
    } catch (error) {
      if (Date.now() > deadline) throw error;
      await sleep(200);
    }
  }
}

async function record(folder: string): Promise<{ command: string; output: string[] }[]> {
  const [http, grpc] = [`127.0.0.1:${await freePort()}`, `127.0.0.1:${await freePort()}`];
  const data = join(folder, 'broker');
  mkdirSync(join(folder, 'site'));
  writeFileSync(join(folder, 'site/index.html'), '<h1>Hello</h1>\n');
  start('broker/main.ts', ['--data-dir', data, '--http', http, '--grpc', grpc]);
  const env: NodeJS.ProcessEnv = { ...process.env, HOME: folder, FARHAND_URL: `http://${http}` };
  const cli = join(root, 'broker/cli/main.ts');
  const shell = async (line: string): Promise<string> => {
    const farhand = `farhand() { '${process.execPath}' '${cli}' "$@"; }\n`;
    const code = farhand + line.replaceAll('/tmp/site', join(folder, 'on-web-1'));
    return (await promisify(execFile)('sh', ['-c', `(${code}) 2>&1`], { cwd: folder, env })).stdout;
  };
  const made = async (verb: string, field: string): Promise<string> => {
    const answer: unknown = JSON.parse(await shell(`farhand ${verb} --data-dir '${data}' -o json`));
    return String(Reflect.get(Object(answer), field));
  };
  env.FARHAND_API_KEY = await eventually(() => made('auth create-key --name recording', 'key'));
  for (const [name, tag] of machines) {
    const args = ['--broker', grpc, '--data-dir', join(folder, name), '--name', name, '--tags', tag];
    start('agent/main.ts', args, { FARHAND_JOIN_TOKEN: await made('join-tokens create', 'token') });
  }
  await eventually(async () => {
    const online: unknown = JSON.parse(await shell('farhand machines list --status online -o json'));
    if (!Array.isArray(online) || online.length !== machines.length)
      throw new Error('the agents are not linked yet');
  });
  const steps: { command: string; output: string[] }[] = [];
  for (const command of typed) {
    const output = (await shell(command)).replaceAll(join(folder, 'on-web-1'), '/tmp/site').trimEnd();
    steps.push({ command, output: output === '' ? [] : output.split('\n') });
  }
  return steps;
}

// ---- Drawing the picture

const letter = { width: 7.83, height: 19, size: 13 };
const margin = 18;
const barHeight = 30;
/** Seconds per typed character, before an output, between two commands, and before the animation starts again. */
const pace = { letter: 0.035, answer: 0.45, command: 0.9, rest: 6 };

const escaped = (line: string): string =>
  line.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;');

/**
 * Returns an SVG with all lines. The animation hides each line until its time; without animation, all lines are
 * visible.
 */
function picture(steps: readonly { command: string; output: string[] }[]): string {
  const rows: { text: string; at: number; typed?: number }[] = [];
  let at = 0.8;
  for (const { command, output } of steps) {
    const seconds = command.length * pace.letter;
    rows.push({ text: command, at, typed: seconds });
    at += seconds + pace.answer;
    for (const text of output) rows.push({ text, at });
    at += pace.command;
  }
  const total = at + pace.rest;
  const columns = Math.max(...rows.map(({ text, typed: isTyped }) => text.length + (isTyped ? 2 : 0)));
  const width = Math.ceil(columns * letter.width + 2 * margin);
  const height = Math.ceil(barHeight + rows.length * letter.height + 1.5 * margin);
  const percent = (seconds: number): string => `${((seconds / total) * 100).toFixed(3)}%`;
  const styles: string[] = [];
  const animate = (name: string, timing: string, frames: string): void => {
    styles.push(
      `@keyframes ${name} { ${frames} }`,
      `.${name} { animation: ${name} ${total.toFixed(1)}s ${timing} infinite }`,
    );
  };
  const appear = (name: string, from: number): void =>
    animate(name, 'step-end', `0% { opacity: 0 } ${percent(from)}, 100% { opacity: 1 }`);
  const lines = rows.map(({ text, at: from, typed: seconds }, row) => {
    const y = barHeight + margin + row * letter.height;
    const line = (kind: string, name: string, x: number, content: string): string =>
      `<text class="${kind} ${name}" x="${x}" y="${y}">${escaped(content)}</text>`;
    if (seconds === undefined) {
      appear(`r${row}`, from);
      return line('o', `r${row}`, margin, text);
    }
    appear(`p${row}`, from - pace.answer);
    const hidden = `clip-path: inset(0 100% 0 0); animation-timing-function: steps(${text.length})`;
    const frames = `0%, ${percent(from)} { ${hidden} } ${percent(from + seconds)}, 100% { clip-path: inset(0) }`;
    animate(`r${row}`, 'linear', frames);
    return line('p', `p${row}`, margin, '$') + line('c', `r${row}`, margin + 2 * letter.width, text);
  });
  const dots = ['#ff5f57', '#febc2e', '#28c840'].map(
    (color, index) => `<circle cx="${margin + index * 18}" cy="15" r="5.5" fill="${color}"/>`,
  );
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img" aria-label="farhand lists machines, runs a command on two of them, copies a directory, and passes on an exit code">
<style>
text { font: ${letter.size}px ui-monospace, 'SFMono-Regular', Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre }
.p { fill: #7ee787 } .c { fill: #ffffff } .o { fill: #c9d1d9 }
@media (prefers-reduced-motion: no-preference) {
${styles.join('\n')}
}
</style>
<rect width="${width}" height="${height}" rx="8" fill="#161b22" stroke="#484f58"/>
${dots.join('\n')}
${lines.join('\n')}
</svg>
`;
}

const folder = mkdtempSync(join(tmpdir(), 'farhand-recording-'));
try {
  const svg = picture(await record(folder));
  writeFileSync(target, svg);
  console.log(`${target}: ${svg.length} bytes`);
} finally {
  const ended = children.map((child) => new Promise((resolve) => child.once('close', resolve)));
  for (const child of [...children].reverse()) child.kill('SIGTERM');
  await Promise.all(ended);
  rmSync(folder, { recursive: true, force: true });
}

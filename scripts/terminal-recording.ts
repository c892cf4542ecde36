// Creates docs/recording.svg, the animated terminal in the README, by running real commands against three agents.
// Usage: node scripts/terminal-recording.ts
import { execFile } from 'node:child_process';
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { bench, firstSecrets, program, root } from './bench/start-and-measure-programs.ts';

const target = join(root, 'docs/recording.svg');

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

async function record(folder: string): Promise<{ command: string; output: string[] }[]> {
  const data = join(folder, 'broker');
  mkdirSync(join(folder, 'site'));
  writeFileSync(join(folder, 'site/index.html'), '<h1>Hello</h1>\n');
  const flags = ['--data-dir', data, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
  const { http, grpc = '' } = (await program('broker/main.ts', flags, 'broker is up')).line;
  const { key, token } = await firstSecrets(data, machines.length);
  for (const [name, tag] of machines) {
    const place = ['--broker', grpc, '--join-token', token, '--data-dir', join(folder, name)];
    await program('agent/main.ts', [...place, '--name', name, '--tags', tag], 'linked');
  }
  const env = { ...process.env, HOME: folder, FARHAND_URL: http, FARHAND_API_KEY: key };
  const shell = async (line: string): Promise<string> => {
    const cli = `farhand() { '${process.execPath}' '${join(root, 'broker/cli/main.ts')}' "$@"; }\n`;
    const code = cli + line.replaceAll('/tmp/site', join(folder, 'on-web-1'));
    return (await promisify(execFile)('sh', ['-c', `(${code}) 2>&1 </dev/null`], { cwd: folder, env }))
      .stdout;
  };
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

await bench(async (folder) => {
  const svg = picture(await record(folder));
  writeFileSync(target, svg);
  console.log(`${target}: ${svg.length} bytes`);
});

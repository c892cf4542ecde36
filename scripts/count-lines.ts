// Counts the lines of code of each module, without blank lines and comments. Lists long functions and files.
// Usage: node scripts/count-lines.ts [DIRECTORY OF A CHECKOUT]
import { readdirSync, readFileSync } from 'node:fs';
import { join, relative } from 'node:path';
import { parseSync } from 'oxc-parser';

const root = process.argv[2] ?? join(import.meta.dirname, '..');
const functionCeiling = 60;
const fileCeiling = 400;

interface Counted {
  path: string;
  code: number;
  lines: number;
  functions: { name: string; line: number; lines: number }[];
}

/** True if the lines of this file are counted: sources, shell scripts, unit files, styles and pages. */
const counts = (path: string): boolean =>
  /\.(ts|tsx|sh|service|css|html|conf)(\.in)?$/.test(path) && !path.includes('node_modules');

function filesBelow(folder: string): string[] {
  const found = readdirSync(join(root, folder), { recursive: true, withFileTypes: true });
  const files = found.filter((one) => one.isFile()).map((one) => join(one.parentPath, one.name));
  return files.filter(counts).sort();
}

/** Returns the source with every comment replaced by spaces. */
function withoutComments(path: string, source: string): string {
  if (!/\.tsx?$/.test(path)) return source.replaceAll(/^\s*#.*$/gm, '');
  const { comments } = parseSync(path, source);
  return comments.reduce(
    (text, { start, end }) =>
      text.slice(0, start) + text.slice(start, end).replaceAll(/\S/g, ' ') + text.slice(end),
    source,
  );
}

interface Node {
  type: string;
  start: number;
  end: number;
  [key: string]: unknown;
}

const isNode = (value: unknown): value is Node =>
  typeof value === 'object' && value !== null && typeof (value as Partial<Node>).type === 'string';

function functionsOf(path: string, source: string): Counted['functions'] {
  if (!/\.tsx?$/.test(path)) return [];
  const lineOf = (at: number): number => source.slice(0, at).split('\n').length;
  const found: Counted['functions'] = [];
  const walk = (node: Node, name: string): void => {
    const key = isNode(node.id) ? node.id : isNode(node.key) ? node.key : undefined;
    const named = typeof key?.name === 'string' ? key.name : name;
    if (/^(FunctionDeclaration|FunctionExpression|ArrowFunctionExpression)$/.test(node.type)) {
      const line = lineOf(node.start);
      found.push({ name: named, line, lines: lineOf(node.end) - line + 1 });
    }
    for (const child of Object.values(node).flat()) if (isNode(child)) walk(child, named);
  };
  walk(parseSync(path, source).program as unknown as Node, '(module)');
  return found;
}

function count(file: string): Counted {
  const [path, source] = [relative(root, file), readFileSync(file, 'utf8')];
  const code = withoutComments(path, source)
    .split('\n')
    .filter((line) => line.trim()).length;
  return { path, code, lines: source.split('\n').length - 1, functions: functionsOf(path, source) };
}

const sum = (files: Counted[], of: (file: Counted) => number): number =>
  files.reduce((total, file) => total + of(file), 0);

function print(name: string, files: Counted[]): void {
  const numbers = [sum(files, (file) => file.code), sum(files, (file) => file.lines), files.length];
  console.log(name.padEnd(28) + numbers.map((number) => String(number).padStart(8)).join(''));
}

const files = ['agent', 'broker', 'shared'].flatMap(filesBelow).map(count);
console.log(`${'module'.padEnd(28)}    code   lines   files`);
for (const [module, own = []] of Map.groupBy(files, ({ path }) => path.split('/').slice(0, 2).join('/'))) {
  print(module, own);
}
for (const side of ['agent', 'broker', 'shared']) {
  print(
    side,
    files.filter(({ path }) => path.startsWith(`${side}/`)),
  );
}
print('product', files);

const long = files.flatMap(({ path, functions }) =>
  functions
    .filter(({ lines }) => lines > functionCeiling)
    .map(({ name, line, lines }) => `${path}:${line} ${name} has ${lines} lines`),
);
console.log(`\nfunctions over ${functionCeiling} lines: ${long.length}`);
for (const one of long) console.log(`  ${one}`);
for (const { path, lines } of files) if (lines > fileCeiling) console.log(`  ${path} has ${lines} lines`);

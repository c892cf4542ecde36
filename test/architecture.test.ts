// The import rules of the project. A broken rule prints its reason and the files. Each rule is also tested on made-up
// files that break it.
import { execFileSync } from 'node:child_process';
import { readdirSync, readFileSync } from 'node:fs';
import { isBuiltin } from 'node:module';
import { join, posix } from 'node:path';
import { parseSync } from 'oxc-parser';
import { describe, expect, test } from 'vitest';

// ---- The properties of a file that rules check

interface Import {
  /** A path from the root of the project, a package, or `node:…`. */
  target: string;
  line: number;
  typeOnly: boolean;
}

interface SourceFile {
  path: string;
  lines: number;
  imports: Import[];
  /** Globals and members of globals that the code uses as values: `setTimeout`, `process.env`, `new Date()`. */
  uses: { name: string; line: number }[];
}

interface Node {
  type: string;
  start: number;
  [key: string]: unknown;
}

type Sources = Record<string, string>;

const isNode = (value: unknown): value is Node =>
  typeof value === 'object' && value !== null && typeof (value as Node).type === 'string';

const children = (node: Node): Node[] => Object.values(node).flat().filter(isNode);

// Syntax that wraps a value: `x as T`, `x!`, `x?.y`, `x satisfies T`.
const wrappers = ['TSAsExpression', 'TSNonNullExpression', 'TSSatisfiesExpression', 'ChainExpression'];

function textOf(node: unknown): string {
  return isNode(node) && node.type === 'Literal' && typeof node.value === 'string' ? node.value : '';
}

/** Returns an expression as a dotted name: `process.env` for `globalThis.process!['env']`. */
function nameOf(node: unknown): string {
  if (!isNode(node)) return '?';
  if (node.type === 'Identifier') return String(node.name);
  if (node.type === 'MetaProperty') return 'import.meta';
  if (wrappers.includes(node.type)) return nameOf(node.expression);
  if (node.type !== 'MemberExpression') return '?';
  const member = node.computed ? textOf(node.property) : nameOf(node.property);
  return `${nameOf(node.object)}.${member}`.replace(/^global(This)?\./, '');
}

/** Returns the module of an import, export, import() or require, as written. */
function specifierOf(node: Node): string {
  const resolvers = ['require', 'require.resolve', 'import.meta.resolve'];
  if (node.type !== 'CallExpression') return textOf(node.source);
  return resolvers.includes(nameOf(node.callee)) ? textOf((node.arguments as unknown[])[0]) : '';
}

function isTypeOnly(node: Node): boolean {
  const kinds = [node, ...children(node)].map((part) => part.importKind ?? part.exportKind);
  const specifiers = kinds.slice(1).filter((kind) => kind !== undefined);
  return (
    kinds[0] === 'type' ||
    node.type === 'TSImportType' ||
    (specifiers.length > 0 && specifiers.every((kind) => kind === 'type'))
  );
}

function targetOf(path: string, specifier: string): string {
  if (specifier.startsWith('.')) return posix.join(posix.dirname(path), specifier);
  return isBuiltin(specifier) && !specifier.startsWith('node:') ? `node:${specifier}` : specifier;
}

/** Returns the globals that one node uses. Its children are not included. */
function usesOf(node: Node): string[] {
  if (node.type === 'Identifier' || node.type === 'MemberExpression') return [nameOf(node)];
  if (node.type === 'NewExpression' && (node.arguments as unknown[]).length === 0) {
    return [`new ${nameOf(node.callee)}()`];
  }
  if (node.type === 'CallExpression') {
    const event = textOf((node.arguments as unknown[])[0]) || '?';
    return [`${nameOf(node.callee)}(${event})`];
  }
  if (node.type === 'VariableDeclarator' && isNode(node.id) && node.id.type === 'ObjectPattern') {
    const keys = children(node.id).map((property) => nameOf(property.key));
    return keys.map((key) => `${nameOf(node.init)}.${key}`.replace(/^global(This)?\./, ''));
  }
  return [];
}

/** Returns the child that is only the name of a member, as in `x.setTimeout` or `{ setTimeout: x }`. */
function memberName(node: Node): unknown {
  if (node.computed || node.shorthand) return undefined;
  return node.type === 'MemberExpression' ? node.property : node.key;
}

function parse(path: string, source: string): SourceFile {
  const { program, errors } = parseSync(path, source, { preserveParens: false });
  if (errors[0]) throw new Error(`${path}: ${errors[0].message}`);
  const file: SourceFile = { path, lines: source.trimEnd().split('\n').length, imports: [], uses: [] };
  const lineStarts = [0, ...[...source.matchAll(/\n/g)].map(({ index }) => index + 1)];
  const lineOf = (node: Node) => lineStarts.findLastIndex((start) => start <= node.start) + 1;
  const walk = (node: Node, inType: boolean) => {
    const specifier = specifierOf(node);
    if (specifier) {
      file.imports.push({
        target: targetOf(path, specifier),
        line: lineOf(node),
        typeOnly: isTypeOnly(node),
      });
    }
    if (node.type === 'ImportDeclaration') return;
    const typed = inType || (node.type.startsWith('TS') && !wrappers.includes(node.type));
    if (!typed) file.uses.push(...usesOf(node).map((name) => ({ name, line: lineOf(node) })));
    for (const child of children(node)) if (child !== memberName(node)) walk(child, typed);
  };
  walk(program as unknown as Node, false);
  return file;
}

// ---- The rules

interface Rule {
  name: string;
  reason: string;
  find: (files: SourceFile[]) => string[];
  /** Made-up projects: each in `breaks` breaks the rule, and `keeps` follows it. */
  breaks: Sources[];
  keeps: Sources;
}

/**
 * True if a path is in one of these modules. `a/b` stands for a/b.ts and all files in a/b/, and `a/b*` for every path
 * with that prefix.
 */
function isIn(path: string, ...folders: string[]): boolean {
  return folders.some((folder) =>
    folder.endsWith('*')
      ? path.startsWith(folder.slice(0, -1))
      : path === `${folder}.ts` || path.startsWith(`${folder}/`),
  );
}

const product = (path: string) => isIn(path, 'agent', 'broker', 'shared');

/** Finds imports from one kind of file to one kind of target. */
const imports =
  (from: (path: string) => boolean, to: (target: string, path: string) => boolean) => (files: SourceFile[]) =>
    files
      .filter((file) => from(file.path))
      .flatMap((file) =>
        file.imports
          .filter(({ target }) => to(target, file.path))
          .map(({ target, line }) => `${file.path}:${line} imports ${target}`),
      );

const uses = (from: (path: string) => boolean, name: RegExp) => (files: SourceFile[]) =>
  files
    .filter((file) => from(file.path))
    .flatMap((file) =>
      file.uses
        .filter((use) => name.test(use.name))
        .map((use) => `${file.path}:${use.line} uses ${use.name}`),
    );

const sides: Rule[] = [
  {
    name: 'shared imports neither side',
    reason: 'agent and broker both build on shared; they pass to shared what it needs of them',
    find: imports(
      (path) => isIn(path, 'shared'),
      (target) => isIn(target, 'agent', 'broker'),
    ),
    breaks: [
      { 'shared/a.ts': "import { x } from '../agent/b.ts';" },
      { 'shared/api/a.ts': "import type { X } from '../../broker/b.ts';" },
      { 'shared/a.ts': "let x: import('../broker/b.ts').X;" },
      { 'shared/a.ts': "await import('../broker/b.ts');" },
    ],
    keeps: { 'shared/a.ts': "import './b.ts'; import '../proto/types/agent.ts'; // import '../agent/b.ts'" },
  },
  {
    name: 'agent and broker never import each other',
    reason: 'they run on different machines in different versions and meet only on the wire',
    find: (files) => [
      ...imports(
        (path) => isIn(path, 'agent'),
        (target) => isIn(target, 'broker'),
      )(files),
      ...imports(
        (path) => isIn(path, 'broker'),
        (target) => isIn(target, 'agent'),
      )(files),
    ],
    breaks: [
      { 'agent/a.ts': "export * from '../broker/b.ts';" },
      { 'broker/link/a.ts': "export type { X } from '../../agent/b.ts';" },
    ],
    keeps: {
      'agent/a.ts': "import '../shared/b.ts';",
      'test/a.ts': "import '../agent/b.ts'; import '../broker/b.ts';",
    },
  },
  {
    name: 'the CLI imports only the SDK, the API, errors, and what every program shares',
    reason: 'the CLI proves that the public API is enough; only its doctor looks at the machine itself',
    find: imports(
      (path) => isIn(path, 'broker/cli'),
      (target) =>
        isIn(target, 'agent', 'broker', 'shared', 'proto') &&
        !isIn(
          target,
          'broker/cli',
          'shared/sdk',
          'shared/api',
          'shared/defined-fields',
          'shared/durable-file',
          'shared/errors',
          'shared/system-error-messages',
          'shared/read-settings',
          'shared/program-start-and-end',
          'shared/version',
          'shared/sanitize-text',
          'shared/clock',
          'shared/duration',
          'shared/tar',
          'shared/paths-in-checkout-or-package',
          'shared/doctor',
          'shared/percent-used',
          'shared/quote-for-shell',
        ),
    ),
    breaks: [
      { 'broker/cli/a.ts': "import '../machines.ts';" },
      { 'broker/cli/a.ts': "import type { Logger } from '../../shared/logger.ts';" },
    ],
    keeps: { 'broker/cli/a.ts': "import '../../shared/sdk/index.ts'; import './b.ts'; import 'commander';" },
  },
];

/** Finds imports of the console that a browser cannot load, or that bypass the API. */
function foreignToConsole(files: SourceFile[]): string[] {
  const allowed = ({ target, typeOnly }: Import): boolean =>
    isIn(target, 'broker/console', 'shared/sdk', 'shared/percent-used') ||
    (typeOnly && isIn(target, 'shared/api')) ||
    !(target.startsWith('node:') || isIn(target, 'agent', 'broker', 'shared', 'proto'));
  return files
    .filter(({ path }) => isIn(path, 'broker/console'))
    .flatMap(({ path, imports: all }) =>
      all.filter((one) => !allowed(one)).map(({ target, line }) => `${path}:${line} imports ${target}`),
    );
}

sides.push(
  {
    name: 'the console imports only the SDK, types of the API, and itself',
    reason: 'it runs in a browser, and proves that the public API is enough; schemas would bring zod along',
    find: foreignToConsole,
    breaks: [
      { 'broker/console/a.tsx': "import '../http/server.ts';" },
      { 'broker/console/a.ts': "import { scopes } from '../../shared/api/route.ts';" },
      { 'broker/console/pages/a.tsx': "import 'node:fs';" },
    ],
    keeps: {
      'broker/console/pages/a.tsx':
        "import type { Scope } from '../../../shared/api/route.ts'; import '../../../shared/sdk/index.ts'; import 'preact';",
    },
  },
  {
    name: 'nothing imports the console',
    reason: 'the broker serves its built files and never runs it',
    find: imports(
      (path) => !isIn(path, 'broker/console'),
      (target) => isIn(target, 'broker/console'),
    ),
    breaks: [{ 'broker/http/a.ts': "import '../console/main.tsx';" }],
    keeps: { 'broker/console/main.tsx': "import './app.tsx';" },
  },
);

const nouns = ['machines', 'files', 'commands', 'sessions', 'schedules', 'webhooks', 'keys', 'audit'];
const below: Record<string, string[]> = {
  schedules: ['commands', 'machines'],
  commands: ['machines'],
  files: ['machines'],
  sessions: ['machines'],
};
const nounOf = (path: string) => nouns.find((noun) => isIn(path, `broker/${noun}`));

const order: Rule[] = [
  {
    name: 'nouns import each other one way',
    reason: 'schedules -> commands -> machines; files, sessions -> machines; any other way ends in a knot',
    find: imports(
      (path) => nounOf(path) !== undefined,
      (target, path) => {
        const [from, to] = [nounOf(path), nounOf(target)];
        return from !== undefined && to !== undefined && from !== to && !below[from]?.includes(to);
      },
    ),
    breaks: [
      { 'broker/machines.ts': "import './commands/index.ts';" },
      { 'broker/commands/run.ts': "import '../schedules/fire.ts';" },
      { 'broker/files.ts': "import './sessions.ts';" },
    ],
    keeps: {
      'broker/schedules/fire.ts':
        "import './when.ts'; import '../commands/index.ts'; import '../machines.ts';",
      'broker/sessions.ts': "import './machines.ts'; import './history.ts';",
    },
  },
  {
    name: 'only start imports webhooks and audit',
    reason: 'webhooks and audit listen to events; a direct caller would have to know all listeners',
    find: imports(
      (path) => !isIn(path, 'test', 'broker/start', 'broker/webhooks', 'broker/audit-log'),
      (target) => isIn(target, 'broker/webhooks', 'broker/audit-log'),
    ),
    breaks: [
      { 'broker/http/app.ts': "import '../audit-log.ts';" },
      { 'broker/event-log.ts': "import './webhooks/deliver.ts';" },
    ],
    keeps: {
      'broker/start.ts': "import './audit-log.ts';",
      'broker/webhooks/index.ts': "import './sign.ts';",
    },
  },
  {
    name: 'nothing in the broker but start imports http',
    reason: 'http imports nouns, not the reverse: a noun never sees a request',
    find: imports(
      (path) => isIn(path, 'broker') && !isIn(path, 'broker/http', 'broker/start', 'broker/main'),
      (target) => isIn(target, 'broker/http'),
    ),
    breaks: [{ 'broker/files.ts': "import type { Context } from './http/app.ts';" }],
    keeps: { 'broker/start.ts': "import './http/app.ts';", 'broker/http/app.ts': "import '../files.ts';" },
  },
  {
    name: 'nothing imports test or scripts',
    reason: 'test and scripts are not part of the product; code that others need too belongs in shared',
    find: imports(
      () => true,
      (target, path) => ['test', 'scripts'].some((folder) => isIn(target, folder) && !isIn(path, folder)),
    ),
    breaks: [
      { 'broker/a.ts': "import '../test/tcp-proxy.ts';" },
      { 'test/a.ts': "import '../scripts/generate-proto-types.ts';" },
    ],
    keeps: { 'test/a.ts': "import './tcp-proxy.ts';", 'scripts/bench/a.ts': "import '../start.ts';" },
  },
  {
    name: 'imports form no cycle',
    reason: 'in a cycle, the first importer decides which file runs first; imports of types count too',
    find: cycles,
    breaks: [
      {
        'shared/a.ts': "import './b.ts';",
        'shared/b.ts': "export * from './c.ts';",
        'shared/c.ts': "import './a.ts';",
      },
      { 'shared/a.ts': "import './b.ts';", 'shared/b.ts': "import type { X } from './a.ts';" },
    ],
    keeps: {
      'shared/a.ts': "import './b.ts'; import './c.ts';",
      'shared/b.ts': "import './c.ts';",
      'shared/c.ts': "import '../proto/types/agent.ts';",
    },
  },
];

function cycles(files: SourceFile[]): string[] {
  const byPath = new Map(files.map((file) => [file.path, file]));
  const done = new Set<string>();
  const found: string[] = [];
  const visit = (path: string, way: string[]) => {
    if (way.includes(path)) found.push([...way.slice(way.indexOf(path)), path].join(' -> '));
    if (way.includes(path) || done.has(path)) return;
    const targets = new Set(byPath.get(path)?.imports.map(({ target }) => target));
    for (const target of targets) if (byPath.has(target)) visit(target, [...way, path]);
    done.add(path);
  };
  for (const file of files) visit(file.path, []);
  return found;
}

// A name that ends in "/" or "-" stands for all libraries with that prefix.
const librariesByFolder: [libraries: string[], folders: string[]][] = [
  [['lowdb'], ['broker/state']],
  [['node:sqlite'], ['broker/history', 'shared/directory-lock']],
  [['pg'], ['broker/history']],
  [['croner', 'cronstrue'], ['broker/schedules']],
  [
    ['koa', 'koa-', '@koa/', 'prom-client', 'zod-openapi', '@fastify/busboy', 'mime', 'raw-body', 'ws'],
    ['broker/http'],
  ],
  // execa starts other programs. A running agent must not load execa.
  [['execa'], ['shared/systemd', 'broker/cli']],
  [['@lydell/node-pty', '@koromix/koffi'], ['agent/processes']],
  [['systeminformation'], ['agent/metrics']],
  [
    ['@grpc/'],
    [
      ...[
        'shared/grpc-service-from-proto',
        'shared/grpc-api-client',
        'agent/link*',
        'broker/link',
        'broker/grpc-api*',
      ],
      'broker/cluster/peers',
    ],
  ],
  [['protobufjs'], ['shared/load-protos', 'shared/grpc-service-from-proto']],
  [['grpc-health-check'], ['broker/grpc-api']],
  [['undici'], ['broker/cli', 'broker/deliveries']],
  [['ipaddr.js'], ['broker/deliveries']],
  // Loaded when the first e-mail is sent.
  [['nodemailer'], ['broker/alerts']],
  [['rate-limiter-flexible'], ['broker/request-checks/rate-limits']],
  [['smol-toml'], ['shared/read-settings']],
  [['@peculiar/x509', 'reflect-metadata'], ['broker/ca-and-broker-certificates']],
  [['pino'], ['shared/logger']],
  [['commander', '@clack/prompts', 'cli-table3'], ['broker/cli']],
  [['nanoid'], ['shared/ids-and-secrets']],
  [
    ['preact', '@preact/', 'uplot', '@xterm/', '@codemirror/', '@lezer/', 'lucide-static'],
    ['broker/console'],
  ],
];

const libraries: Rule[] = librariesByFolder.flatMap(([names, homes]) =>
  names.map((name) => {
    const open = /[-/]$/.test(name);
    const example = open ? `${name}x` : name;
    return {
      name: `${name}${open ? '*' : ''} is imported only in ${homes.join(', ')}`,
      reason: 'one library, one folder: replacing it, or learning its traps, concerns one place',
      find: imports(
        (path) => product(path) && !isIn(path, ...homes),
        (target) => target === name || target.startsWith(open ? name : `${name}/`),
      ),
      breaks: [
        { 'broker/elsewhere.ts': `import type { X } from '${example}';` },
        { 'shared/elsewhere.ts': `const page = require.resolve('${example}/y');` },
      ],
      keeps: Object.fromEntries(homes.map((home) => [`${home.replace('*', '')}.ts`, `import '${example}';`])),
    };
  }),
);

/** Returns the files of shared/api and shared/sdk, and all files that they load at run time. */
function portable(files: SourceFile[]): Set<string> {
  const byPath = new Map(files.map((file) => [file.path, file]));
  const reached = new Set([...byPath.keys()].filter((path) => isIn(path, 'shared/api', 'shared/sdk')));
  for (const path of reached) {
    for (const { target, typeOnly } of byPath.get(path)?.imports ?? []) {
      if (!typeOnly && byPath.has(target)) reached.add(target); // The loop also visits paths that are added during it.
    }
  }
  return reached;
}

// The console may use the real time, because tests cannot move the clock of a browser.
const maySeeTime = (path: string) => isIn(path, 'shared/clock', 'broker/console/timers', 'scripts', 'test');
const mayTouchProcess = (path: string) =>
  isIn(
    path,
    ...['agent/main', 'broker/main', 'shared/run-service-program', 'agent/processes/spawner/main'],
    ...['broker/cli', 'scripts', 'test'],
  );
const forbiddenNames = ['utils', 'helpers', 'common', 'types', 'services', 'controllers', 'managers'];

const runtime: Rule[] = [
  {
    name: 'shared/api and shared/sdk need nothing of node',
    reason: 'the SDK and all files that it loads also run in browsers, which have no node: modules',
    find: (files) => {
      const reached = portable(files);
      return imports(
        (path) => reached.has(path),
        (target) => target.startsWith('node:'),
      )(files);
    },
    breaks: [
      { 'shared/sdk/a.ts': "import 'fs';" },
      { 'shared/api/a.ts': "import type { Readable } from 'node:stream';" },
      { 'shared/sdk/a.ts': "import { b } from '../b.ts';", 'shared/b.ts': "import 'node:crypto';" },
    ],
    keeps: {
      'shared/sdk/a.ts': "import type { B } from '../b.ts'; import 'zod';",
      'shared/b.ts': "import 'node:crypto';",
    },
  },
  {
    name: 'time comes from shared/clock alone',
    reason: 'tests move the clock; a timer or a time taken elsewhere would not move with it',
    find: (files) => [
      ...uses(
        (path) => !maySeeTime(path),
        /^(Date\.now|new Date\(\)|Date\(.*\)|performance\.now|process\.hrtime|setTimeout|setInterval)$/,
      )(files),
      ...imports(
        (path) => !maySeeTime(path),
        (target) => /^node:(timers|perf_hooks)/.test(target),
      )(files),
    ],
    breaks: [
      'const now = Date.now();',
      'const now = new Date();',
      'const took = globalThis.performance.now();',
      'setTimeout(() => {}, 1);',
      'const later = { every: setInterval };',
      'const { now } = Date;',
      "import { setTimeout } from 'node:timers/promises';",
    ].map((source) => ({ 'agent/a.ts': source })),
    keeps: {
      'agent/a.ts':
        'const at = new Date(0); let t: ReturnType<typeof setTimeout>; x.setTimeout(1); // Date.now()',
      'shared/clock.ts': 'export const now = () => Date.now();',
      'test/a.ts': 'setTimeout(() => {}, 1);',
    },
  },
  {
    name: 'tests wait with waitFor() of test/wait-for.ts',
    reason: 'vi.waitFor() gives up after one second, which is too short on a busy machine',
    find: uses((path) => path !== 'test/wait-for.ts', /^vi\.waitFor$/),
    breaks: [{ 'test/a.test.ts': 'await vi.waitFor(() => f());' }],
    keeps: { 'test/a.test.ts': 'await waitFor(() => f());', 'test/wait-for.ts': 'vi.waitFor(f);' },
  },
  {
    name: 'only mains, the CLI, scripts and tests touch the process',
    reason:
      'only main files and what runs them use environment, exit and signals; others get values as parameters',
    find: (files) => [
      ...uses(
        (path) => !mayTouchProcess(path),
        /^process\.(env|exit|exitCode|(on|once|addListener|prependListener)\((SIG.*|\?)\))$/,
      )(files),
      // Importing node:process under another name would hide its use from the rule above.
      ...imports(
        (path) => !mayTouchProcess(path),
        (target) => target === 'node:process',
      )(files),
    ],
    breaks: [
      'const home = process.env.HOME;',
      "const home = process?.['env'];",
      'const { env } = process;',
      'process.exit(1);',
      'process.exitCode = 1;',
      "process.on('SIGTERM', stop);",
      'for (const signal of signals) process.once(signal, stop);',
      "import { env } from 'node:process';",
    ].map((source) => ({ 'agent/processes/a.ts': source })),
    keeps: {
      'agent/start.ts':
        "const { env } = options; process.kill(pid, 'SIGTERM'); process.on('warning', log); let exit;",
      'agent/main.ts': "process.on('SIGTERM', stop); process.exit(Number(process.env.CODE));",
    },
  },
  {
    name: 'no file has more than 400 lines',
    reason: 'a module that outgrows its file becomes a folder of the same name',
    find: (files) =>
      files
        .filter((file) => (product(file.path) || isIn(file.path, 'scripts')) && file.lines > 400)
        .map((file) => `${file.path} has ${file.lines} lines`),
    breaks: [{ 'agent/a.ts': 'f();\n'.repeat(401) }],
    keeps: { 'agent/a.ts': 'f();\n'.repeat(400), 'test/a.ts': 'f();\n'.repeat(500) },
  },
  {
    name: 'no file or folder has a name that says nothing',
    reason: `the name of a file must say what is in it: not ${forbiddenNames.join(', ')}`,
    find: (files) =>
      files
        .map((file) => file.path)
        .filter((path) => path.split(/[/.]/).some((part) => forbiddenNames.includes(part))),
    breaks: [{ 'shared/utils.ts': '' }, { 'agent/services/a.ts': '' }, { 'test/helpers.ts': '' }],
    keeps: { 'agent/systemd-service.ts': '', 'shared/commonplace.ts': '' },
  },
];

const confinement: Rule[] = [
  {
    name: 'file operations reach the disk through confined paths alone',
    reason: 'agent/files/confine/confined-fs takes only judged paths; node:fs takes any path',
    find: imports(
      (path) =>
        isIn(path, 'agent/files') &&
        // These modules read the journal and /etc/passwd, whose paths never come from a request.
        !isIn(
          path,
          'agent/files/confine',
          'agent/files/atomic/temporary-files-journal',
          'agent/files/users-groups',
        ),
      (target) => target.startsWith('node:fs'),
    ),
    breaks: [
      { 'agent/files/touch.ts': "import { utimes } from 'node:fs/promises';" },
      { 'agent/files/archive/a.ts': "import type { Stats } from 'fs';" },
    ],
    keeps: {
      'agent/files/touch.ts': "import { lutimes } from './confine/confined-fs.ts';",
      'agent/files/confine/confined-fs.ts': "import * as fs from 'node:fs/promises';",
    },
  },
];

const rules = [...confinement, ...sides, ...order, ...libraries, ...runtime];

// ---- The project, and the rules themselves

function projectFiles(): SourceFile[] {
  const root = join(import.meta.dirname, '..');
  return ['agent', 'broker', 'shared', 'scripts', 'test'].flatMap((folder) =>
    readdirSync(join(root, folder), { recursive: true, encoding: 'utf8' })
      .filter((path) => /\.tsx?$/.test(path))
      .map((path) => parse(`${folder}/${path}`, readFileSync(join(root, folder, path), 'utf8'))),
  );
}

const made = (sources: Sources) => Object.entries(sources).map(([path, source]) => parse(path, source));

describe('in this project', () => {
  const files = projectFiles();

  test('the rules see the files', () => {
    expect(files.map((file) => file.path)).toContain('test/architecture.test.ts');
  });

  test('no function of the product has more than 60 lines, no file more than 400', () => {
    const report = execFileSync(process.execPath, [join(import.meta.dirname, '../scripts/count-lines.ts')]);
    const [, over = ''] = report.toString().split('functions over 60 lines: ');
    expect(over.trim(), 'a longer function or file does two things: split it').toBe('0');
  });

  for (const { name, reason, find } of rules) {
    test(name, () => {
      const found = find(files);
      expect(found, `${reason}\n  ${found.join('\n  ')}\n`).toEqual([]);
    });
  }
});

describe('made-up files', () => {
  for (const { name, find, breaks, keeps } of rules) {
    test(`that break "${name}" are reported, and no other files`, () => {
      for (const sources of breaks) expect(find(made(sources)), JSON.stringify(sources)).toHaveLength(1);
      expect(find(made(keeps))).toEqual([]);
    });
  }

  test('that cannot be parsed are an error, not files without imports', () => {
    expect(() => parse('agent/a.ts', 'import {')).toThrow('agent/a.ts');
  });
});

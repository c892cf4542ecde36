// Runs the real `farhand`, bundled as it is shipped, as a process that connects to a real broker.
import { type ChildProcess, spawn } from 'node:child_process';
import { expect, onTestFinished } from 'vitest';
import { shipped, shippedProgram } from './bundled-programs.ts';
import { type TestSystem, temporaryFolder } from './start-farhand.ts';

/** Time limit, in milliseconds, of a test that starts dozens of programs one after another. */
export const severalProgramsMs = 180_000;

export interface Ending {
  code: number | null;
  signal: NodeJS.Signals | null;
  stdout: Buffer;
  out: string;
  err: string;
}

/** Value of `input` for a standard input that stays open and gets no data. */
export const open = Symbol('open');

export interface RunOptions {
  input?: string | Buffer | typeof open;
  env?: Record<string, string | undefined>;
  cwd?: string;
  /** A file descriptor that receives standard output. */
  stdout?: number;
  /** A program with arguments that runs `farhand`, such as setpriv. */
  through?: string[];
}

export interface Running {
  child: ChildProcess;
  ended: Promise<Ending>;
  /** Resolves when standard output or standard error has matched the pattern. */
  says(pattern: RegExp): Promise<void>;
}

export interface Line {
  /** `verb` is one string, such as 'machines list', so that verbs.test.ts can find which verbs have a test. */
  (verb: string, args?: string[], options?: RunOptions): Promise<Ending>;
  start(verb: string, args?: string[], options?: RunOptions): Running;
  /** Runs a verb with -o json, expects success and returns the parsed output. */
  // biome-ignore lint/suspicious/noExplicitAny: the tests look into answers as a script would
  json(verb: string, args?: string[], options?: RunOptions): Promise<any>;
  home: string;
  /** The program itself, for tests that start it in another way. */
  program: { file: string; env: Record<string, string> };
}

/** Returns the command line of a user who is logged in to `system`. Without `system`, the user is not logged in. */
export function createLine(system?: Pick<TestSystem, 'url' | 'key'>): Line {
  const main = shippedProgram('farhand');
  const home = temporaryFolder('home');
  const plain = { PATH: process.env.PATH ?? '', HOME: home, XDG_CACHE_HOME: shipped };
  const env = { ...plain, ...(system && { FARHAND_URL: system.url, FARHAND_API_KEY: system.key }) };
  const start = (verb: string, args: string[] = [], options: RunOptions = {}): Running =>
    begin([main, ...verb.split(' ').filter(Boolean), ...args], {
      cwd: home,
      ...options,
      env: { ...env, ...options.env },
    });
  const line = (verb: string, args?: string[], options?: RunOptions): Promise<Ending> =>
    start(verb, args, options).ended;
  return Object.assign(line, {
    start,
    home,
    program: { file: main, env },
    async json(verb: string, args: string[] = [], options?: RunOptions) {
      const cut = args.indexOf('--');
      const at = cut < 0 ? args.length : cut;
      const { code, out, err } = await line(verb, args.toSpliced(at, 0, '-o', 'json'), options);
      expect([code, err], `${verb} ${args.join(' ')}`).toEqual([0, '']);
      return JSON.parse(out);
    },
  });
}

function begin(argv: string[], { input, env, cwd, stdout = -1, through = [] }: RunOptions): Running {
  const stdin = input === undefined ? 'ignore' : 'pipe';
  const [file = '', ...args] = [...through, process.execPath, ...argv];
  const child = spawn(file, args, { env, cwd, stdio: [stdin, stdout < 0 ? 'pipe' : stdout, 'pipe'] });
  onTestFinished(() => void child.kill('SIGKILL'));
  // A program that ends early does not read its input, which is no failure of the test.
  child.stdin?.on('error', () => {});
  if (input !== open) child.stdin?.end(input);
  const [out, err]: Buffer[][] = [[], []];
  const lookers = new Set<() => void>();
  for (const [stream, kept] of [
    [child.stdout, out],
    [child.stderr, err],
  ] as const) {
    stream?.on('data', (chunk: Buffer) => {
      kept?.push(chunk);
      for (const look of lookers) look();
    });
  }
  const text = (kept: Buffer[] = []): string => Buffer.concat(kept).toString();
  const ended = new Promise<Ending>((resolve) => {
    child.once('close', (code, signal) => {
      resolve({ code, signal, stdout: Buffer.concat(out ?? []), out: text(out), err: text(err) });
    });
  });
  return {
    child,
    ended,
    says: (pattern) =>
      new Promise((resolve, reject) => {
        const look = (): void => {
          if (pattern.test(text(out)) || pattern.test(text(err))) resolve();
        };
        lookers.add(look);
        look();
        void ended.then(() => reject(new Error(`ended without ${pattern}: ${text(out)}${text(err)}`)));
      }),
  };
}

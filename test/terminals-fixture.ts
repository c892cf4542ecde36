// Runs terminals of an agent without a broker. The test controls their clients message by message.
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { onTestFinished } from 'vitest';
import { type Processes, type ProcessesOptions, startProcesses } from '../agent/processes/index.ts';
import type { AttachTerminalRequest__Output } from '../proto/types/farhand/agent/v1/AttachTerminalRequest.ts';
import type { ProcessExit } from '../proto/types/farhand/agent/v1/ProcessExit.ts';
import type { TerminalEvent } from '../proto/types/farhand/agent/v1/TerminalEvent.ts';
import type { TerminalSpec__Output } from '../proto/types/farhand/agent/v1/TerminalSpec.ts';
import { type AgentCall, gaveUp } from '../shared/agent-rpcs.ts';
import { newId } from '../shared/ids-and-secrets.ts';
import { createLogger } from '../shared/logger.ts';

/** The error of a call whose link is lost. */
const linkLost = new Error('the link to the broker was lost');

export function call(signal: AbortSignal = new AbortController().signal): AgentCall {
  return { signal };
}

export interface Keeper {
  /** Resolves with the pid of the shell. */
  started(): Promise<number>;
  exit(): Promise<ProcessExit>;
  /** Ends the call that supervises the terminal. */
  leave(): void;
}

type Doing = Partial<Omit<AttachTerminalRequest__Output, 'message'>>;

export interface Viewer {
  text(): string;
  bytes(): Buffer;
  /** The offset of the first byte that the client was sent, and the size of the terminal. */
  head(): { offset: number; cols: number; rows: number };
  /**
   * The last report of the agent. `taken` counts the input bytes that it has accepted from this client. If `known` is
   * true, they include the input of earlier calls.
   */
  input(): { taken: number; known: boolean };
  sizes: { cols: number; rows: number }[];
  /** The offset after the last byte that the client has received. */
  position(): number;
  do(doing: Doing): void;
  type(text: string | Uint8Array): void;
  /** Waits for a text in the output after the previous match. Output after the text is left for the next call. */
  sees(what: string | RegExp): Promise<void>;
  /** Waits until the client's position has reached this offset. */
  reaches(position: number): Promise<void>;
  /** Turns acknowledgements of output on or off. */
  taking(on: boolean): void;
  /** Stops reading the output. */
  stop(): void;
  /** Ends the call as a lost link does. */
  lose(): void;
  /** Detaches the client on purpose. */
  leave(): void;
  /** Resolves at the end of the client's call. Rejects with its error. */
  ended: Promise<void>;
}

export interface Bench {
  processes: Processes;
  home: string;
  open(spec?: Partial<TerminalSpec__Output>, id?: string): Keeper;
  keep(id: string): Keeper;
  attach(id: string, options?: { client?: string; offset?: number; taking?: boolean }): Viewer;
  /** Stops the agent. Starts another agent on the same directory. */
  again(): Promise<void>;
}

const plain = { program: '/bin/sh', args: [] as string[], env: { PS1: '$ ' } };
/** A spec for a terminal that runs this line of shell. */
export const sh = (line: string): Partial<TerminalSpec__Output> => ({
  program: '/bin/sh',
  args: ['-c', line],
});

export async function startBench(limits: ProcessesOptions['limits'] = {}): Promise<Bench> {
  const home = await mkdtemp(join(tmpdir(), 'farhand-terminals-'));
  const startAgain = (): Promise<Processes> =>
    startProcesses({
      directory: join(home, 'agent'),
      log: createLogger('test', 'silent'),
      mayRunAs: true,
      limits: { stopGraceMs: 50, ...limits },
    });
  const bench: Bench = {
    processes: await startAgain(),
    home,
    open(spec = {}, id = newId('session')) {
      const all = { cwd: home, size: { cols: 80, rows: 24 }, grace_ms: 60_000, ...plain, ...spec };
      return keeper((own) => bench.processes.openTerminal({ id, spec: all }, own));
    },
    keep: (id) => keeper((own) => bench.processes.keepTerminal({ id }, own)),
    attach: (id, options = {}) => viewer(bench.processes, id, options),
    async again() {
      await bench.processes.stop();
      bench.processes = await startAgain();
    },
  };
  onTestFinished(async () => {
    await bench.processes.stop();
    await rm(home, { recursive: true, force: true });
  });
  return bench;
}

function keeper(ask: (own: AgentCall) => AsyncIterable<{ event?: TerminalEvent | null }>): Keeper {
  const abort = new AbortController();
  const started = Promise.withResolvers<number>();
  const events = (async () => {
    const seen: TerminalEvent[] = [];
    for await (const { event } of ask(call(abort.signal))) {
      if (event) seen.push(event);
      if (event?.started) started.resolve(event.started.pid ?? 0);
    }
    return seen;
  })();
  events.catch((error: unknown) => started.reject(error));
  void events.then(() => started.reject(new Error('it never started'))).catch(() => {});
  started.promise.catch(() => {});
  return {
    started: () => started.promise,
    async exit() {
      const exit = (await events).find((event) => event.exit)?.exit;
      if (!exit) throw new Error('no exit was reported');
      return exit;
    },
    leave: () => abort.abort(linkLost),
  };
}

function viewer(
  processes: Processes,
  id: string,
  { client = newId('client'), offset, taking = true }: { client?: string; offset?: number; taking?: boolean },
): Viewer {
  const abort = new AbortController();
  const doings: Doing[] = [{ open: { id, client_id: client, ...(offset !== undefined && { offset }) } }];
  const pieces: Buffer[] = [];
  const sizes: Viewer['sizes'] = [];
  let head = { offset: 0, cols: 0, rows: 0 };
  const input = { taken: -1, known: false };
  let [position, searched, takes, stopped, left] = [0, 0, taking, false, false];
  const news = new EventTarget();
  const notify = (): void => void news.dispatchEvent(new Event('news'));
  const heard = (): Promise<void> =>
    new Promise((resolve) => news.addEventListener('news', () => resolve(), { once: true }));

  async function* requests(): AsyncGenerator<AttachTerminalRequest__Output> {
    for (;;) {
      const next = doings.shift();
      if (next) yield next;
      else if (abort.signal.aborted) throw linkLost;
      else if (left) return;
      else await heard();
    }
  }
  async function read(): Promise<void> {
    for await (const answer of processes.attachTerminal(requests(), call(abort.signal))) {
      const { head: first, output, size, input_taken } = answer;
      if (first) input.known = first.known ?? false;
      if (input_taken !== undefined) input.taken = Number(input_taken);
      if (first)
        head = {
          offset: Number(first.offset),
          cols: first.size?.cols ?? 0,
          rows: first.size?.rows ?? 0,
        };
      if (first) position = head.offset;
      if (size) sizes.push({ cols: size.cols ?? 0, rows: size.rows ?? 0 });
      if (output) {
        const data = Buffer.from(output.data ?? '');
        if (output.offset !== position) throw new Error(`a gap at ${position}`);
        if (data.length > 64 * 1024) throw new Error('a piece is too large');
        pieces.push(data);
        position += data.length;
        if (takes) doings.push({ taken: position });
      }
      notify();
      while (stopped && !abort.signal.aborted) await heard();
    }
  }
  const ended = read().finally(() => {
    over = true;
    notify();
  });
  let over = false;
  ended.catch(() => {});
  const bytes = (): Buffer => Buffer.concat(pieces);
  async function until(done: () => boolean): Promise<void> {
    while (!done()) {
      if (over) {
        await ended;
        throw new Error(`it ended before that: ${bytes().toString().slice(-500)}`);
      }
      await heard();
    }
  }
  return {
    bytes,
    text: () => bytes().toString(),
    head: () => head,
    input: () => input,
    sizes,
    position: () => position,
    do(doing) {
      doings.push(doing);
      notify();
    },
    type(text) {
      this.do({ input: Buffer.from(text) });
    },
    async sees(what) {
      await until(() => {
        const rest = bytes().toString('latin1').slice(searched);
        const wanted = typeof what === 'string' ? Buffer.from(what).toString('latin1') : what;
        const at = typeof wanted === 'string' ? rest.indexOf(wanted) : rest.search(wanted);
        if (at < 0) return false;
        const length = typeof wanted === 'string' ? wanted.length : (rest.match(wanted)?.[0].length ?? 0);
        searched += at + length;
        return true;
      });
    },
    reaches: (end) => until(() => position >= end),
    taking(on) {
      takes = on;
      if (on) this.do({ taken: position });
    },
    stop() {
      stopped = true;
    },
    lose() {
      abort.abort(linkLost);
      notify();
    },
    leave() {
      left = true;
      abort.abort(gaveUp);
      notify();
    },
    ended,
  };
}

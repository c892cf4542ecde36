// One client of a terminal, from its first byte to its parting: over lost links it sees every byte once.
import type { AttachTerminalHead__Output } from '../../proto/types/farhand/agent/v1/AttachTerminalHead.ts';
import type { TerminalOutput__Output } from '../../proto/types/farhand/agent/v1/TerminalOutput.ts';
import type { TerminalSize__Output } from '../../proto/types/farhand/agent/v1/TerminalSize.ts';
import { cols as colsSchema, rows as rowsSchema } from '../../shared/api/sessions.ts';
import { after } from '../../shared/clock.ts';
import { AppError, type Code } from '../../shared/errors.ts';
import { terminalReplayBytes } from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Link } from '../presence/index.ts';
import type { ClientPort, Doing, Note, Parting } from './client.ts';
import { Outbox } from './outbox.ts';
import type { Attached } from './records.ts';
import { type Run, until } from './run.ts';

export interface ServingHooks {
  /** It typed; how much and what is nobody's business. */
  typed(): void;
  /** It did what an observer may not. */
  refused(): void;
  resized(size: { cols: number; rows: number }): void;
}

/** Of a client that is served. */
interface Served {
  run: Run;
  attached: Attached;
  /** First byte of output wanted; the agent decides where there is none. */
  offset: number | undefined;
  port: ClientPort;
  hooks: ServingHooks;
  log: Logger;
}

/** Input goes to the machine in pieces of this size. */
const inputBytes = 32 * 1024;
/** What a client may be given before it takes it; the agent sends more output only while it cannot hear what is taken. */
const mostUntaken = 2 * terminalReplayBytes;
/** What a note costs, about. */
const noteBytes = 256;
/** An agent that did not take a client, though it is there, is asked again after this. */
const againMs = 1_000;

/** What an agent says that has nothing more for the clients of a terminal that has ended. */
const nothingLeft: readonly Code[] = ['range_not_satisfiable', 'session_not_found', 'conflict'];

/** Serves a client until the session is over, the signal fires, or the agent has lost its place. Never rejects. */
export async function serve(served: Served, signal: AbortSignal): Promise<Parting> {
  const { port, log } = served;
  const doings = port.doings[Symbol.asyncIterator]();
  const conversation = new Conversation(served, signal);
  conversation.listen(doings).catch((error: unknown) => log.debug({ err: error }, 'a client broke off'));
  void conversation.tellStatus();
  try {
    return await conversation.run();
  } catch (error) {
    log.error({ err: error }, 'a client of a session was let go');
    return { why: 'detached' };
  } finally {
    conversation.close();
    doings.return?.().catch(() => {});
  }
}

class Conversation {
  readonly #served: Served;
  readonly #signal: AbortSignal;
  readonly #outbox = new Outbox();
  /** The next byte that the client is to get. */
  #position: number | undefined;
  #ready = false;
  /** Bytes that its port was given and the client has not taken. */
  #untaken = 0;
  /** It has all there will ever be. */
  #drained = false;

  constructor(served: Served, signal: AbortSignal) {
    this.#served = served;
    this.#signal = signal;
    this.#position = served.offset;
  }

  async run(): Promise<Parting> {
    const { run } = this.#served;
    while (!this.#signal.aborted) {
      const { link, session } = run;
      if (link && !this.#drained && (session.status === 'CONNECTED' || run.ended)) {
        const parting = await this.#attach(link);
        if (parting) return parting;
        if (run.link === link && !this.#drained) await this.#pause();
      } else if (run.over) return partingOf(run);
      else await run.changed.wait(this.#signal);
    }
    return { why: 'detached' };
  }

  /** Takes what the client does, as fast as the agent takes it: while that is away nothing more is read. */
  async listen(doings: AsyncIterator<Doing>): Promise<void> {
    for (let next = await doings.next(); !next.done; next = await doings.next()) {
      if (this.#signal.aborted) return;
      await this.#do(next.value);
    }
  }

  /** The client learns when its machine is away, and when it is back. */
  async tellStatus(): Promise<void> {
    const { run } = this.#served;
    let told = 'CONNECTED';
    while (!this.#signal.aborted) {
      const { status } = run.session;
      if (status !== told && ['CONNECTED', 'GRACE_PERIOD'].includes(status)) {
        told = status;
        await this.#note({ type: 'status', status });
      } else await run.changed.wait(this.#signal);
    }
  }

  close(): void {
    this.#outbox.close();
  }

  async #do(doing: Doing): Promise<void> {
    const { attached, hooks } = this.#served;
    if (attached.mode === 'observer') {
      hooks.refused();
      return this.#note({ type: 'refused', message: 'an observer only watches: attach as operator' });
    }
    if ('input' in doing) hooks.typed();
    for (const message of messagesOf(doing)) await this.#outbox.give(message, this.#signal);
    if ('size' in doing && !this.#signal.aborted) hooks.resized(doing.size);
  }

  /** Before it is asked again; not when that would tell nothing new. */
  async #pause(): Promise<void> {
    const { run } = this.#served;
    const { ended } = run;
    const enough = new AbortController();
    const cancel = after(againMs, () => enough.abort());
    await until(run, () => run.ended && !ended, AbortSignal.any([enough.signal, this.#signal]));
    cancel();
  }

  /** One call to the agent, to the end of the output or of the link. */
  async #attach(link: Link): Promise<Parting | undefined> {
    const { run, attached, log } = this.#served;
    const { client_id, request_id } = attached;
    const offset = this.#position;
    const open = { id: run.session.id, client_id, ...(offset !== undefined && { offset }) };
    const call = new AbortController();
    const requests = this.#outbox.requests(open, call.signal);
    const options = {
      request_id,
      caller: attached,
      lane: 'terminal',
      idle_ms: 0,
      signal: this.#signal,
    } as const;
    try {
      for await (const answer of link.stub.attachTerminal(requests, options)) {
        const { head, output, size, input_taken } = answer;
        if (input_taken !== undefined && !head) this.#outbox.confirm(input_taken);
        if (head) await this.#begin(head, input_taken);
        else if (output) await this.#give(output);
        else if (size) await this.#resized(size);
        if (this.#signal.aborted) return undefined;
      }
      // Without the end of its session it was only shown out.
      if (!run.ended) await this.#pause();
      this.#drained = run.ended;
      return undefined;
    } catch (error) {
      const code = error instanceof AppError ? error.code : undefined;
      if (!this.#signal.aborted) log.info({ why: code ?? error, client_id }, 'a client lost its terminal');
      this.#drained = run.ended && code !== undefined && nothingLeft.includes(code);
      if (code === 'range_not_satisfiable' && !run.ended) return { why: 'fell_behind' };
      return run.over ? partingOf(run) : undefined;
    } finally {
      call.abort();
    }
  }

  async #begin(head: AttachTerminalHead__Output, input_taken: number | undefined): Promise<void> {
    const { offset, size, known } = head;
    const { attached, run } = this.#served;
    if (this.#position !== undefined && offset !== this.#position) throw lostPlace(this.#position, offset);
    this.#position = offset;
    const lost = this.#outbox.begin({ offset, input_taken, known });
    // Nobody is left to type to.
    if (lost > 0 && !run.ended) await this.#note({ type: 'refused', message: mayBeLost(lost) });
    if (this.#ready) return;
    this.#ready = true;
    const { cols, rows } = sizeOf(size) ?? run.session;
    await this.#note({ type: 'ready', client_id: attached.client_id, offset, cols, rows });
  }

  async #give({ offset, data }: TerminalOutput__Output): Promise<void> {
    if (!this.#ready || offset !== this.#position) throw lostPlace(this.#position ?? 0, offset);
    const end = offset + data.length;
    this.#position = end;
    const taken = this.#served.port.output(data).then(() => this.#outbox.taken(end));
    await this.#underWay(taken, data.length);
  }

  async #resized(told: TerminalSize__Output): Promise<void> {
    const size = sizeOf(told);
    if (size) await this.#note({ type: 'size', ...size });
  }

  #note(note: Note): Promise<void> {
    return this.#underWay(this.#served.port.note(note), noteBytes);
  }

  /**
   * Goes on while the client takes it: else nobody would hear that the client has fallen behind. It waits where much is
   * under way: whoever causes many notes could fill our memory else.
   */
  async #underWay(taken: Promise<void>, bytes: number): Promise<void> {
    this.#untaken += bytes;
    const done = taken.then(() => {
      this.#untaken -= bytes;
    });
    if (this.#untaken > mostUntaken) await unlessAborted(done, this.#signal);
  }
}

function mayBeLost(bytes: number): string {
  return `the link was lost for too long: the last ${bytes} bytes typed before may not all have arrived`;
}

function messagesOf(doing: Doing): Doing[] {
  if (!('input' in doing)) return [doing];
  const { input } = doing;
  const pieces = Array.from({ length: Math.ceil(input.length / inputBytes) }, (_, n) => n * inputBytes);
  return pieces.map((at) => ({ input: Buffer.from(input.subarray(at, at + inputBytes)) }));
}

/** What a machine tells as a size, if it can be one. */
function sizeOf(told: TerminalSize__Output | null): { cols: number; rows: number } | undefined {
  const cols = colsSchema.safeParse(told?.cols);
  const rows = rowsSchema.safeParse(told?.rows);
  return cols.success && rows.success ? { cols: cols.data, rows: rows.data } : undefined;
}

function lostPlace(wanted: number, told: number): AppError {
  return new AppError('machine_error', 'the machine sent another part of the output', { wanted, told });
}

function partingOf({ session: { exit_code, signal, reason } }: Run): Parting {
  return { why: 'ended', exit_code, signal, reason };
}

function unlessAborted(promise: Promise<void>, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const done = (): void => {
      signal.removeEventListener('abort', done);
      resolve();
    };
    signal.addEventListener('abort', done, { once: true });
    if (signal.aborted) done();
    void promise.finally(done);
  });
}

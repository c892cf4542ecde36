// One client of a terminal, from its first byte to its parting: over lost links it sees every byte once.
import type { AttachTerminalHead__Output } from '../../proto/types/farhand/agent/v1/AttachTerminalHead.ts';
import type { AttachTerminalOpen } from '../../proto/types/farhand/agent/v1/AttachTerminalOpen.ts';
import type { AttachTerminalRequest } from '../../proto/types/farhand/agent/v1/AttachTerminalRequest.ts';
import type { TerminalOutput__Output } from '../../proto/types/farhand/agent/v1/TerminalOutput.ts';
import type { TerminalSize__Output } from '../../proto/types/farhand/agent/v1/TerminalSize.ts';
import { cols as colsSchema, rows as rowsSchema } from '../../shared/api/sessions.ts';
import { Wake } from '../../shared/backpressure.ts';
import { monotonic } from '../../shared/clock.ts';
import { AppError, type Code } from '../../shared/errors.ts';
import { terminalReplayBytes } from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Link } from '../presence/index.ts';
import type { ClientPort, Doing, Note, Parting } from './client.ts';
import type { Attached } from './records.ts';
import type { OpenSession } from './session.ts';

/** The client that is served. */
interface ServedClient {
  readonly attached: Attached;
  readonly session: OpenSession;
  /** First byte of output wanted; undefined: the agent decides. */
  readonly offset: number | undefined;
  /** Puts on record what it did. */
  audit(action: string, result: string): void;
}

/** What is audited of typing: that there was some, once in this time. */
const auditMs = 60_000;
/** What a client may be given before it takes it; the agent sends more output only while it cannot hear what is taken. */
const mostUntaken = 2 * terminalReplayBytes;
/** What a note costs, about. */
const noteBytes = 256;
/** An agent that did not take a client, though it is there, is asked again after this. */
const againMs = 1_000;

/** What an agent says that has nothing more for the clients of a terminal that has ended. */
const nothingLeft: readonly Code[] = ['range_not_satisfiable', 'session_not_found', 'conflict'];

/** One client that is served: over lost links it sees every byte once. */
export class Conversation {
  readonly #client: ServedClient;
  readonly #session: OpenSession;
  readonly #port: ClientPort;
  readonly #signal: AbortSignal;
  readonly #log: Logger;
  readonly #input = new AgentInput();
  /** The next byte that the client is to get; undefined: the agent decides. */
  #position: number | undefined;
  #ready = false;
  /** Bytes that its port was given and the client has not taken. */
  #untaken = 0;
  readonly #taken = new Wake();
  /** It has all there will ever be. */
  #drained = false;
  #auditedAt = Number.NEGATIVE_INFINITY;

  constructor(client: ServedClient, port: ClientPort, signal: AbortSignal, log: Logger) {
    this.#client = client;
    this.#session = client.session;
    this.#position = client.offset;
    this.#port = port;
    this.#signal = signal;
    this.#log = log;
  }

  /** Until the session is over, the signal fires, or the agent has lost its place. Never rejects. */
  async run(): Promise<Parting> {
    this.#listen().catch((error: unknown) => this.#log.debug({ err: error }, 'a client broke off'));
    void this.#reportStatus();
    try {
      return await this.#follow();
    } catch (error) {
      this.#log.error({ err: error }, 'a client of a session was let go');
      return { why: 'detached' };
    }
  }

  /** Takes what the client does, as fast as the agent takes it: while that is away nothing more is read. */
  async #listen(): Promise<void> {
    for await (const doing of this.#port.doings) {
      if (this.#signal.aborted) return;
      await this.#do(doing);
    }
  }

  async #do(doing: Doing): Promise<void> {
    const observes = this.#client.attached.mode === 'observer';
    if (observes || 'input' in doing) this.#audit(observes ? 'forbidden' : 'ok');
    if (observes) {
      return this.#note({ type: 'refused', message: 'an observer only watches: attach as operator' });
    }
    await this.#input.send(doing, this.#signal);
    if ('size' in doing && !this.#signal.aborted) this.#session.resized(doing.size);
  }

  /** That it typed, or being an observer tried to; how much and what is private. */
  #audit(result: 'ok' | 'forbidden'): void {
    if (monotonic() - this.#auditedAt < auditMs) return;
    this.#auditedAt = monotonic();
    const { client_id } = this.#client.attached;
    if (result === 'forbidden') this.#log.info({ client_id }, 'an observer tried to take part');
    this.#client.audit('sessions.input', result);
  }

  /** The client learns when its machine is away, and when it is back. */
  async #reportStatus(): Promise<void> {
    let reported = 'CONNECTED';
    while (!this.#signal.aborted) {
      const { status } = this.#session.record;
      if (status !== reported && ['CONNECTED', 'GRACE_PERIOD'].includes(status)) {
        reported = status;
        await this.#note({ type: 'status', status });
      } else await this.#session.changed.wait(this.#signal);
    }
  }

  async #follow(): Promise<Parting> {
    const session = this.#session;
    while (!this.#signal.aborted) {
      const { link, record, ended } = session;
      if (link && !this.#drained && (record.status === 'CONNECTED' || ended)) {
        const parting = await this.#attach(link);
        if (parting) return parting;
        // Not at once, unless that would tell something new.
        const another = (): boolean => this.#drained || session.link !== link || session.ended !== ended;
        await session.until(another, againMs, this.#signal);
      } else if (session.over) return endOf(session);
      else await session.changed.wait(this.#signal);
    }
    return { why: 'detached' };
  }

  /** One call to the agent, to the end of the output or of the link. */
  async #attach(link: Link): Promise<Parting | undefined> {
    const session = this.#session;
    const { client_id, request_id } = this.#client.attached;
    const offset = this.#position;
    const open = { id: session.record.id, client_id, ...(offset !== undefined && { offset }) };
    const call = new AbortController();
    const signal = this.#signal;
    const caller = this.#client.attached;
    const options = { request_id, caller, lane: 'terminal', idle_ms: 0, signal } as const;
    try {
      const answers = link.stub.attachTerminal(this.#input.requests(open, call.signal), options);
      for await (const { head, output, size, input_taken } of answers) {
        if (head) await this.#begin(head, input_taken);
        else if (input_taken !== undefined) this.#input.acknowledge(input_taken);
        if (output) await this.#give(output);
        if (size) await this.#resized(size);
        if (signal.aborted) return undefined;
      }
      // The output of a session that goes on has no end: then the agent only showed this client out.
      await session.until(() => session.ended, againMs, signal);
      this.#drained = session.ended;
      return undefined;
    } catch (error) {
      const code = error instanceof AppError ? error.code : undefined;
      if (!signal.aborted) this.#log.info({ why: code ?? error, client_id }, 'a client lost its terminal');
      this.#drained = session.ended && code !== undefined && nothingLeft.includes(code);
      if (code === 'range_not_satisfiable' && !session.ended) return { why: 'fell_behind' };
      return session.over ? endOf(session) : undefined;
    } finally {
      call.abort();
    }
  }

  async #begin(
    { offset, size, known }: AttachTerminalHead__Output,
    input_taken: number | undefined,
  ): Promise<void> {
    const { client_id } = this.#client.attached;
    const { record, ended } = this.#session;
    if (this.#position !== undefined && offset !== this.#position) throw lostPlace(this.#position, offset);
    this.#position = offset;
    const lost = this.#input.begin({ offset, input_taken, known });
    // A session that has ended takes no input.
    if (lost > 0 && !ended) await this.#note({ type: 'refused', message: mayBeLost(lost) });
    if (this.#ready) return;
    this.#ready = true;
    const { cols, rows } = sizeOf(size) ?? record;
    await this.#note({ type: 'ready', client_id, offset, cols, rows });
  }

  async #give({ offset, data }: TerminalOutput__Output): Promise<void> {
    if (!this.#ready || offset !== this.#position) throw lostPlace(this.#position ?? 0, offset);
    const end = offset + data.length;
    this.#position = end;
    const taken = this.#port.output(data).then(() => this.#input.taken(end));
    await this.#underWay(taken, data.length);
  }

  async #resized(reported: TerminalSize__Output): Promise<void> {
    const size = sizeOf(reported);
    if (size) await this.#note({ type: 'size', ...size });
  }

  #note(note: Note): Promise<void> {
    return this.#underWay(this.#port.note(note), noteBytes);
  }

  /**
   * Goes on while the client takes it: else the client would never hear that it has fallen behind. It waits where much
   * is under way: many notes, whatever causes them, could fill our memory else.
   */
  async #underWay(taken: Promise<void>, bytes: number): Promise<void> {
    this.#untaken += bytes;
    void taken.then(() => {
      this.#untaken -= bytes;
      this.#taken.wake();
    });
    while (this.#untaken > mostUntaken && !this.#signal.aborted) await this.#taken.wait(this.#signal);
  }
}

function mayBeLost(bytes: number): string {
  return `the link was lost for too long: the last ${bytes} bytes typed before may not all have arrived`;
}

/** What a machine reports as a size, if it can be one. */
function sizeOf(reported: TerminalSize__Output | null): { cols: number; rows: number } | undefined {
  const cols = colsSchema.safeParse(reported?.cols);
  const rows = rowsSchema.safeParse(reported?.rows);
  return cols.success && rows.success ? { cols: cols.data, rows: rows.data } : undefined;
}

function lostPlace(wanted: number, told: number): AppError {
  return new AppError('machine_error', 'the machine sent another part of the output', { wanted, told });
}

/** How a session that is over has ended. */
export function endOf({ record: { exit_code, signal, reason } }: OpenSession): Parting {
  return { why: 'ended', exit_code, signal, reason };
}

/** While so many bytes of input are unacknowledged, nothing more is sent. */
const mostUnacknowledged = 64 * 1024;
/** Input goes to the agent in pieces of this size, and every so many bytes of output it hears what was taken. */
const pieceBytes = 32 * 1024;

/** Where a call begins, as the agent reports it. */
interface Beginning {
  /** Of the first byte of output. */
  offset: number;
  /** How much of the input it has; undefined: this agent does not count. */
  input_taken: number | undefined;
  /** It still knows this client from an earlier call. */
  known: boolean;
}

/** Outlives the calls: between two of them everything waits. Input is counted in bytes over all calls of the client. */
class AgentInput {
  readonly #changed = new Wake();
  /** What the client does next; not taken while too much input is unacknowledged. */
  #waiting: Doing | undefined;
  /** Input from #acknowledged on. One piece: many small ones would cost far more than they hold. */
  #input: Buffer = Buffer.alloc(0);
  #acknowledged = 0;
  /** Next byte of input to send. */
  #next = 0;
  #counted = false;
  /** The agent has said where this call begins. */
  #begun = false;
  /** Offset of the output that the client has taken, and what the agent was told of it. */
  #taken = 0;
  #reported = 0;

  /** Resolves when a call has taken it, or the signal fires. After a lost link only input is sent again. */
  async send(doing: Doing, signal: AbortSignal): Promise<void> {
    this.#waiting = doing;
    this.#changed.wake();
    while (this.#waiting && !signal.aborted) await this.#changed.wait(signal);
  }

  /** The agent has taken the call. Returns how many bytes of input may be lost. Throws machine_error. */
  begin({ offset, input_taken, known }: Beginning): number {
    const from = this.#counted && known ? input_taken : undefined;
    const resumes = from !== undefined && from >= this.#acknowledged;
    // An agent that has forgotten the client may have taken all that was sent: that must not come twice.
    const lost = resumes ? 0 : this.#next - this.#acknowledged;
    if (resumes) {
      this.#next = this.#acknowledged + this.#input.length;
      this.acknowledge(from);
    } else {
      this.#counted = input_taken !== undefined;
      this.#input = this.#input.subarray(lost);
      this.#acknowledged = input_taken ?? 0;
    }
    this.#next = this.#acknowledged;
    this.#taken = offset;
    this.#reported = offset;
    this.#begun = true;
    this.#changed.wake();
    return lost;
  }

  /** The agent has so much of the input. Throws machine_error when it cannot. */
  acknowledge(input_taken: number): void {
    if (input_taken > this.#next) {
      const details = { sent: this.#next, told: input_taken };
      throw new AppError('machine_error', 'the machine has more input than it was sent', details);
    }
    if (input_taken <= this.#acknowledged) return;
    this.#input = this.#input.subarray(input_taken - this.#acknowledged);
    this.#acknowledged = input_taken;
    if (this.#waiting) this.#changed.wake();
  }

  /** The client has the output up to here. */
  taken(offset: number): void {
    this.#taken = offset;
    if (offset - this.#reported >= pieceBytes) this.#changed.wake();
  }

  /** The requests of one call, until its signal fires. */
  async *requests(open: AttachTerminalOpen, signal: AbortSignal): AsyncGenerator<AttachTerminalRequest> {
    this.#begun = false;
    yield { open };
    while (!signal.aborted) {
      // Before the agent has said so, nobody knows from where on input is to be sent.
      const request = this.#begun ? this.#request() : undefined;
      if (request) yield request;
      else await this.#changed.wait(signal);
    }
  }

  #request(): AttachTerminalRequest | undefined {
    if (this.#taken - this.#reported >= pieceBytes) {
      this.#reported = this.#taken;
      return { taken: this.#taken };
    }
    const waiting = this.#waiting;
    if (waiting && 'input' in waiting) this.#append(waiting.input);
    const at = this.#next - this.#acknowledged;
    if (at < this.#input.length) {
      const input = this.#input.subarray(at, at + pieceBytes);
      this.#next += input.length;
      if (!this.#counted) this.acknowledge(this.#next);
      return { input };
    }
    if (!waiting || 'input' in waiting) return undefined;
    this.#took(undefined);
    return waiting;
  }

  /** As much of what the client types as there is room for. */
  #append(input: Uint8Array): void {
    const room = mostUnacknowledged - this.#input.length;
    this.#input = Buffer.concat([this.#input, input.subarray(0, room)]);
    this.#took(input.length > room ? { input: input.subarray(room) } : undefined);
  }

  #took(rest: Doing | undefined): void {
    this.#waiting = rest;
    if (!rest) this.#changed.wake();
  }
}

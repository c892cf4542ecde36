// Serves one attached client of a terminal. Even if the link to the agent is lost and replaced, the client gets each
// byte of output once, and its input reaches the terminal at most once.
import type { AttachTerminalHead__Output } from '../../proto/types/farhand/agent/v1/AttachTerminalHead.ts';
import type { TerminalOutput__Output } from '../../proto/types/farhand/agent/v1/TerminalOutput.ts';
import type { TerminalSize__Output } from '../../proto/types/farhand/agent/v1/TerminalSize.ts';
import { cols as colsSchema, rows as rowsSchema } from '../../shared/api/terminal-sessions.ts';
import { monotonic } from '../../shared/clock.ts';
import { terminalReplayBytes } from '../../shared/command-and-terminal-limits.ts';
import { AppError, type Code } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { Wake } from '../../shared/wait-for-change.ts';
import type { Link } from '../presence/index.ts';
import type { OpenSession } from './session.ts';
import type { Attached } from './session-records.ts';
import type { Action, ClientPort, CloseReason, Notice } from './terminal-client.ts';
import { UnacknowledgedInput } from './unacknowledged-input.ts';

/** The part of an attached client that the class Conversation uses. */
interface ServedClient {
  readonly attached: Attached;
  readonly session: OpenSession;
  /**
   * Offset of the first byte of output that the client wants. If it is undefined, the agent decides where the output
   * begins.
   */
  readonly offset: number | undefined;
  /** Writes an action of the client to the audit log. */
  audit(action: string, result: string): void;
}

/** Milliseconds between two audit records of a client's input. The input itself is never recorded. */
const auditMs = 60_000;
/**
 * Maximum number of bytes that are on their way to a client. Beyond it, the broker stops reading from the agent.
 * Normally the agent itself pauses earlier, at half of this number.
 */
const mostUnreceived = 2 * terminalReplayBytes;
/** A message without output, such as a change of status, counts as this number of bytes. */
const noticeBytes = 256;
/** If a linked agent refuses a call, the broker calls it again after this number of milliseconds. */
const retryMs = 1_000;

/** Errors of a call for a terminal that has ended and has no output left. */
const nothingLeft: readonly Code[] = ['range_not_satisfiable', 'session_not_found', 'conflict'];

/** Serves one client. Each new link needs a new call to the agent, so one client may use several calls. */
export class Conversation {
  readonly #client: ServedClient;
  readonly #session: OpenSession;
  readonly #port: ClientPort;
  readonly #signal: AbortSignal;
  readonly #log: Logger;
  readonly #input = new UnacknowledgedInput();
  /** Offset of the next byte to send to the client. If it is undefined, the agent decides where the output begins. */
  #position: number | undefined;
  #ready = false;
  /** Bytes that were sent to the client, but that it has not received yet. */
  #unreceived = 0;
  readonly #received = new Wake();
  /** True when the terminal has ended and the client got all of its output. */
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

  /**
   * Serves the client until the session is over, the signal fires, or the agent no longer has the next byte of output.
   * Never rejects.
   */
  async run(): Promise<CloseReason> {
    this.#listen().catch((error: unknown) =>
      this.#log.debug({ err: error }, 'the input of a terminal client could not be read to its end'),
    );
    void this.#reportStatus();
    try {
      return await this.#follow();
    } catch (error) {
      this.#log.error({ err: error }, 'serving a terminal client failed; the client is detached');
      return { why: 'detached' };
    }
  }

  /** Reads the client's actions as fast as the agent accepts them. While the agent is offline, no action is read. */
  async #listen(): Promise<void> {
    for await (const action of this.#port.actions) {
      if (this.#signal.aborted) return;
      await this.#perform(action);
    }
  }

  async #perform(action: Action): Promise<void> {
    const observes = this.#client.attached.mode === 'observer';
    if (observes || 'input' in action) this.#audit(observes ? 'forbidden' : 'ok');
    if (observes) {
      return this.#notify({ type: 'refused', message: 'observers only watch: attach as operator to type' });
    }
    await this.#input.send(action, this.#signal);
    if ('size' in action && !this.#signal.aborted) this.#session.resized(action.size);
  }

  /**
   * Records that the client has typed, or that an observer has tried to. The input itself is private, and is not
   * recorded.
   */
  #audit(result: 'ok' | 'forbidden'): void {
    if (monotonic() - this.#auditedAt < auditMs) return;
    this.#auditedAt = monotonic();
    const { client_id } = this.#client.attached;
    if (result === 'forbidden') this.#log.info({ client_id }, 'refused input of an observer');
    this.#client.audit('sessions.input', result);
  }

  /** Notifies the client when its machine goes offline and when it comes back. */
  async #reportStatus(): Promise<void> {
    let reported = 'CONNECTED';
    while (!this.#signal.aborted) {
      const { status } = this.#session.record;
      if (status !== reported && ['CONNECTED', 'GRACE_PERIOD'].includes(status)) {
        reported = status;
        await this.#notify({ type: 'status', status });
      } else await this.#session.changed.wait(this.#signal);
    }
  }

  async #follow(): Promise<CloseReason> {
    const session = this.#session;
    while (!this.#signal.aborted) {
      const { link, record, ended } = session;
      if (link && !this.#drained && (record.status === 'CONNECTED' || ended)) {
        const reason = await this.#attach(link);
        if (reason) return reason;
        // The next call to the agent waits for `retryMs`, unless the link or the session changes earlier.
        const another = (): boolean => this.#drained || session.link !== link || session.ended !== ended;
        await session.until(another, retryMs, this.#signal);
      } else if (session.over) return endOf(session);
      else await session.changed.wait(this.#signal);
    }
    return { why: 'detached' };
  }

  /** Makes one call to the agent, and forwards its output until the output or the link ends. */
  async #attach(link: Link): Promise<CloseReason | undefined> {
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
        if (head) await this.#begin(head, input_taken ?? 0);
        else if (input_taken !== undefined) this.#input.acknowledge(input_taken);
        if (output) await this.#sendOutput(output);
        if (size) await this.#resized(size);
        if (signal.aborted) return undefined;
      }
      // The agent ends the output when the session has ended or this client was detached. The report of the session's
      // end may reach the broker a moment later, so the broker waits for it.
      await session.until(() => session.ended, retryMs, signal);
      this.#drained = session.ended;
      return undefined;
    } catch (error) {
      const code = error instanceof AppError ? error.code : undefined;
      if (!signal.aborted)
        this.#log.info(
          { why: code ?? error, client_id },
          'a call to the agent ended early while the broker served a terminal client',
        );
      this.#drained = session.ended && code !== undefined && nothingLeft.includes(code);
      if (code === 'range_not_satisfiable' && !session.ended) return { why: 'fell_behind' };
      return session.over ? endOf(session) : undefined;
    } finally {
      call.abort();
    }
  }

  async #begin({ offset, size, known }: AttachTerminalHead__Output, input_taken: number): Promise<void> {
    const { client_id } = this.#client.attached;
    const { record, ended } = this.#session;
    if (this.#position !== undefined && offset !== this.#position) throw wrongOffset(this.#position, offset);
    this.#position = offset;
    const { cols, rows } = record;
    const reported = sizeOf(size) ?? record;
    // The terminal did not get the last size if the link was lost at that moment.
    const isOldSize = this.#ready && (reported.cols !== cols || reported.rows !== rows);
    const repeated = isOldSize && this.#client.attached.mode === 'operator' ? { cols, rows } : undefined;
    const lost = this.#input.begin({ offset, input_taken, known }, repeated);
    // The client is warned that input may be lost, but only while the session is open. After the end of the session, no
    // program reads input.
    if (lost > 0 && !ended) await this.#notify({ type: 'refused', message: mayBeLost(lost) });
    if (this.#ready) return;
    this.#ready = true;
    await this.#notify({
      ...{ type: 'ready', client_id, offset, window: terminalReplayBytes },
      ...{ cols: reported.cols, rows: reported.rows, answered: record.sent_to },
    });
  }

  async #sendOutput({ offset, data }: TerminalOutput__Output): Promise<void> {
    if (!this.#ready || offset !== this.#position) throw wrongOffset(this.#position ?? 0, offset);
    const end = offset + data.length;
    this.#position = end;
    if (this.#client.attached.mode === 'operator') this.#session.sent(end);
    const taken = this.#port.output(data).then(() => this.#input.taken(end));
    await this.#countUntilReceived(taken, data.length);
  }

  async #resized(reported: TerminalSize__Output): Promise<void> {
    const size = sizeOf(reported);
    if (size) await this.#notify({ type: 'size', ...size });
  }

  #notify(notice: Notice): Promise<void> {
    return this.#countUntilReceived(this.#port.notify(notice), noticeBytes);
  }

  /**
   * Counts these bytes as unreceived until `taken` resolves. Waits while more than `mostUnreceived` bytes are
   * unreceived, because a slow client could otherwise fill the memory.
   */
  async #countUntilReceived(taken: Promise<void>, bytes: number): Promise<void> {
    this.#unreceived += bytes;
    void taken.then(() => {
      this.#unreceived -= bytes;
      this.#received.wake();
    });
    while (this.#unreceived > mostUnreceived && !this.#signal.aborted)
      await this.#received.wait(this.#signal);
  }
}

function mayBeLost(bytes: number): string {
  return `the connection to the machine was lost; some of the last ${bytes} typed bytes may not have arrived`;
}

/** Returns the size that an agent has reported; undefined if it is not valid. */
function sizeOf(reported: TerminalSize__Output | null): { cols: number; rows: number } | undefined {
  const cols = colsSchema.safeParse(reported?.cols);
  const rows = rowsSchema.safeParse(reported?.rows);
  return cols.success && rows.success ? { cols: cols.data, rows: rows.data } : undefined;
}

function wrongOffset(wanted: number, sent: number): AppError {
  return new AppError('machine_error', 'the agent sent output from the wrong offset', { wanted, sent });
}

/** Returns the close reason for the clients of a session that is over. */
export function endOf({ record: { exit_code, signal, reason } }: OpenSession): CloseReason {
  return { why: 'ended', exit_code, signal, reason };
}

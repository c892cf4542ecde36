// A session that is open, or whose clients still read its last output. Stores the changes of the session, and
// supervises its terminal on the agent.
import type { ProcessExit__Output } from '../../proto/types/farhand/agent/v1/ProcessExit.ts';
import type { TerminalEvent__Output } from '../../proto/types/farhand/agent/v1/TerminalEvent.ts';
import type { TerminalSpec } from '../../proto/types/farhand/agent/v1/TerminalSpec.ts';
import type { EventType } from '../../shared/api/events.ts';
import type { Caller, Journal } from '../../shared/api/route-table.ts';
import { after, now, sleep } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import type { Logger } from '../../shared/logger.ts';
import { Wake } from '../../shared/wait-for-change.ts';
import type { Acknowledgements } from '../link/acknowledge-results.ts';
import type { Link } from '../presence/index.ts';
import type { Attached, Session, SessionRecords, Status } from './session-records.ts';
import type { SessionServices } from './session-services.ts';

/** Services and state that all sessions share. */
export interface SessionContext extends SessionServices {
  records: SessionRecords;
  /**
   * The open sessions by id, oldest first. A session that has ended remains here while clients still read its last
   * output.
   */
  sessions: Map<string, OpenSession>;
  acknowledgements: Acknowledgements;
  /** Fires when the broker stops. */
  stopping: AbortSignal;
  log: Logger;
}

/** The part of an attached client that its session uses. */
interface SessionClient {
  readonly attached: Attached;
  /** Detaches the client. Resolves once the detachment is stored on disk. Never rejects. */
  detach(why: 'detached' | 'forbidden' | 'stopping'): Promise<void>;
  /** Must be called once it is stored on disk that the session has ended. */
  sessionEnded(): void;
}

interface End {
  exit_code?: number | null;
  signal?: string | null;
  reason: string | null;
}

type Requester = Pick<Caller, 'request_id' | 'key_id' | 'key_name'>;
type TerminalEvents = AsyncIterable<{ event?: TerminalEvent__Output | null }>;

const lasting = { idle_ms: 0, lane: 'terminal' } as const;
const resizeMs = 1_000;
/** Milliseconds after which the end of a session is written again if the write failed. */
const rewriteMs = 5_000;
/** Milliseconds between the hangup signal and SIGKILL. */
const killGraceMs = 2_000;
/**
 * After a request to end a session, the broker waits this number of milliseconds for the agent to report the exit of
 * the terminal. Then the broker ends the session itself.
 */
const overdueMs = 15_000;
/** If a call to a linked agent fails or ends early, the broker calls again after this number of milliseconds. */
const retryMs = 1_000;

export class OpenSession {
  record: Session;
  /** True when the session is on disk. Before that, changes of the link are ignored. */
  stored: boolean;
  /** The status as it is on disk. */
  written: Status;
  /** The link to the agent that runs the terminal; undefined while the agent is offline. */
  link: Link | undefined;
  /** True when the session has ended. `over` says whether the end is also on disk. */
  ended = false;
  /** True when the end of the session is on disk. */
  over = false;
  readonly clients = new Map<string, SessionClient>();
  /** Wakes waiting code when the status or the link changes. */
  readonly changed = new Wake();
  readonly #context: SessionContext;
  /** True when the agent has reported the exit of the terminal, so that there is nothing left to kill. */
  #exited = false;
  #cancelGrace = (): void => {};
  #cancelResize = (): void => {};

  constructor(context: SessionContext, record: Session, stored: boolean) {
    this.#context = context;
    this.record = record;
    this.stored = stored;
    this.written = record.status;
    context.sessions.set(record.id, this);
  }

  /** Resolves when `test` is true, the signal fires, `ms` have passed, or the broker stops. */
  until(test: () => boolean, ms: number, signal?: AbortSignal): Promise<void> {
    return this.changed.until(() => test() || this.#context.stopping.aborted, ms, signal);
  }

  /** Opens the terminal if its machine is still online. Must be called only once per session. */
  open(spec: TerminalSpec, requester: Requester): void {
    const link = this.#context.presence.find(this.record.machine_id);
    if (!link) return void this.end({ reason: 'machine_offline: the machine went offline before the start' });
    this.link = link;
    const options = { request_id: requester.request_id, caller: requester, ...lasting };
    void this.#follow(link, link.stub.openTerminal({ id: this.record.id, spec }, options), true);
  }

  /**
   * Requests the end of the terminal and its process tree, now or when its agent is online again. Resolves when the
   * request is on disk.
   */
  async requestEnd(caller: Caller): Promise<void> {
    const { ending } = this.record;
    // `ending` is set before the write, because another change could write the record without `ending` meanwhile.
    this.record = { ...this.record, ending: true };
    const written = this.#context.history.write((transaction) => {
      if (!this.ended) this.#context.records.put(this.record, transaction);
      caller.commit(transaction);
    });
    await written.catch((error: unknown) => {
      this.record = { ...this.record, ending };
      throw error;
    });
    this.#close(caller);
  }

  #close(requester?: Requester): void {
    if (!this.link) return void this.end({ reason: 'ended' });
    this.#kill(requester);
    // If the agent does not report the end within this time, the broker ends the session itself. Otherwise the session
    // could stay open for ever.
    after(overdueMs, () => {
      if (!this.#context.stopping.aborted) void this.end({ reason: 'ended' });
    });
  }

  /** Handles a change of the machine's link. `link` is undefined if the machine went offline. */
  relink(link: Link | undefined): void {
    if (!this.stored) return;
    if (this.link && this.link !== link) this.awaitLink();
    if (link && !this.link && !this.ended) this.#supervise(link);
  }

  /** Handles the loss of the link to the agent. The agent keeps the terminal open for the grace period. */
  awaitLink(): void {
    this.link = undefined;
    this.changed.wake();
    if (this.ended) return;
    const { status, ending, grace_period, grace_period_started_at } = this.record;
    if (ending) return void this.end({ reason: 'ended' });
    const began = grace_period_started_at ?? now();
    // The grace period must not become longer if the clock was set back.
    const left = Math.min(Math.max(0, began + grace_period - now()), grace_period);
    this.#cancelGrace();
    this.#cancelGrace = after(left, () => void this.end({ reason: 'grace_period_over' }));
    if (status === 'GRACE_PERIOD') return;
    const changes = { grace_period_started_at: began, last_heartbeat_at: this.#lastHeartbeat() };
    void this.#change({ status: 'GRACE_PERIOD', ...changes }, 'session.grace_period');
  }

  /** Records a new size of the terminal. Of several sizes within a second, only the last one is stored. */
  resized({ cols, rows }: { cols: number; rows: number }): void {
    if (this.ended || (this.record.cols === cols && this.record.rows === rows)) return;
    this.record = { ...this.record, cols, rows };
    this.#cancelResize();
    this.#cancelResize = after(resizeMs, () => void this.#change({}));
  }

  /** Records that an operator was sent the output up to this offset. It is stored with the next change. */
  sent(offset: number): void {
    if (offset > this.record.sent_to) this.record = { ...this.record, sent_to: offset };
  }

  /**
   * Ends the session. Only the first call counts. Resolves when the end is on disk, or when the broker stops. Never
   * rejects.
   */
  async end({ exit_code = null, signal = null, reason }: End): Promise<void> {
    if (this.ended) return;
    this.ended = true;
    this.changed.wake();
    this.#cancelTimers();
    const { sessions, stopping, log } = this.#context;
    const last_heartbeat_at = this.link ? this.#lastHeartbeat() : this.record.last_heartbeat_at;
    const end = { exit_code, signal, reason, ended_at: now(), last_heartbeat_at };
    const record: Session = { ...this.record, status: 'DISCONNECTED', ...end };
    // After drop(), the end is no longer written: the next owner of the machine may have found the terminal alive.
    while (!this.over && sessions.get(record.id) === this && !stopping.aborted) {
      try {
        await this.#write(record, 'session.disconnected');
        this.record = record;
        this.written = record.status;
        this.over = true;
      } catch (err) {
        log.error({ err, session_id: record.id }, 'the end of a session could not be stored; trying again');
        await sleep(rewriteMs, stopping);
      }
    }
    if (!this.over) return;
    for (const client of this.clients.values()) client.sessionEnded();
    this.closeIfUnread();
    this.changed.wake();
  }

  /**
   * Stops all work on the session, because another broker now owns its machine. The clients must attach again at that
   * broker.
   */
  drop(): void {
    this.ended = true;
    this.link = undefined;
    this.#cancelTimers();
    this.#context.sessions.delete(this.record.id);
    for (const client of this.clients.values()) void client.detach('stopping');
    this.changed.wake();
  }

  /**
   * Removes the session from memory if it is over and all clients are detached. The agent may then delete the result of
   * the terminal.
   */
  closeIfUnread(): void {
    if (!this.over || this.clients.size > 0) return;
    const { id, machine_id } = this.record;
    const { sessions, presence, acknowledgements, stopping } = this.#context;
    sessions.delete(id);
    const link = presence.find(machine_id);
    if (link && !this.#exited && !stopping.aborted) endUnknown(link, id, this.#context);
    else acknowledgements.add(machine_id, [id]);
  }

  /** Detaches all clients and writes pending changes, because the broker stops. Never rejects. */
  async stop(): Promise<void> {
    this.#cancelTimers();
    this.changed.wake();
    const leaving = [...this.clients.values()].map((client) => client.detach('stopping'));
    await Promise.all([...leaving, this.stored && !this.ended && this.#change({})]);
  }

  #supervise(link: Link): void {
    this.link = link;
    const options = { request_id: newId('request'), ...lasting };
    void this.#follow(link, link.stub.keepTerminal({ id: this.record.id }, options), false);
    if (this.record.ending) this.#close();
  }

  /**
   * Handles the events of an openTerminal or keepTerminal call. If the call ends before the session, calls keepTerminal
   * after `retryMs`, unless the link has changed.
   */
  async #follow(link: Link, events: TerminalEvents, opening: boolean): Promise<void> {
    const { stopping, log } = this.#context;
    const current = (): boolean => this.link === link && !this.ended && !stopping.aborted;
    try {
      for await (const { event } of events) {
        if (!current()) return;
        if (event?.started) this.#connected(link);
        if (event?.exit) {
          this.#exited = true;
          return await this.end(endOf(event.exit, this.record, link));
        }
      }
    } catch (error) {
      const why = error instanceof AppError ? error.code : error;
      log.info(
        { why, session_id: this.record.id },
        'the agent’s stream of reports about a session broke off; unless the session has ended, the broker opens the stream again',
      );
      const unopened = opening && this.record.status === 'PENDING';
      const end = refusalOf(error, unopened, this.record, link);
      if (end && current()) return await this.end(end);
    }
    after(retryMs, () => {
      if (current()) this.#supervise(link);
    });
  }

  #connected({ instanceId: instance_id }: Link): void {
    if (this.record.status === 'CONNECTED' || this.ended) return;
    this.#cancelGrace();
    const connected_at = this.record.connected_at ?? now();
    const since = { grace_period_started_at: null, last_heartbeat_at: this.#lastHeartbeat() };
    void this.#change({ status: 'CONNECTED', connected_at, instance_id, ...since }, 'session.connected');
  }

  #kill(requester?: Requester): void {
    const { link, record } = this;
    const { stopping, log } = this.#context;
    if (!link || this.ended || stopping.aborted) return;
    const options = { request_id: requester?.request_id ?? newId('request'), caller: requester };
    link.stub.killProcess({ id: record.id, grace_ms: killGraceMs }, options).catch((error: unknown) => {
      log.warn({ err: error, session_id: record.id }, 'a session could not be killed; trying again in 1 s');
      after(retryMs, () => this.#kill(requester));
    });
  }

  /**
   * Writes a change of the session. A failed write is only logged, because the next change or the end writes the whole
   * record again.
   */
  async #change(changes: Partial<Session>, type?: EventType): Promise<void> {
    const record = { ...this.record, ...changes };
    this.record = record;
    this.changed.wake();
    try {
      await this.#write(record, type);
      this.written = record.status;
      this.changed.wake();
    } catch (error) {
      this.#context.log.error(
        { err: error, session_id: record.id },
        'a change of a session could not be stored',
      );
    }
  }

  async #write(record: Session, type?: EventType): Promise<void> {
    await this.#context.history.write((transaction) => {
      this.#context.records.put(record, transaction);
      if (type) emitEvent(transaction, type, record, this.#context);
    });
  }

  #cancelTimers(): void {
    this.#cancelGrace();
    this.#cancelResize();
  }

  #lastHeartbeat(): number | null {
    return this.#context.machineFacts.of(this.record.machine_id)?.last_seen ?? null;
  }
}

/** The sessions of a machine that are in memory. */
export function sessionsOn(machineId: string, { sessions }: SessionContext): OpenSession[] {
  return [...sessions.values()].filter(({ record }) => record.machine_id === machineId);
}

/** Emits an event of a session, in the transaction of the change. */
export function emitEvent(
  journal: Journal,
  type: EventType,
  { id, machine_id, status }: Session,
  { state, events }: SessionContext,
  more: object = {},
): void {
  const machine = state.machines.get(machine_id) ?? { id: machine_id, name: '' };
  events.emit(journal, type, machine, { session_id: id, status, ...more });
}

/** Ends a terminal that the agent still runs, but whose session is over or unknown to the broker. */
export function endUnknown({ stub, machineId }: Link, id: string, context: SessionContext): void {
  stub
    .killProcess({ id, grace_ms: killGraceMs }, { request_id: newId('request') })
    .catch((err: unknown) =>
      context.log.debug({ err, session_id: id }, 'a terminal whose session is over could not be killed'),
    );
  // Once the terminal has ended, the agent may delete the terminal's result.
  context.acknowledgements.add(machineId, [id]);
}

const ran = ['PROCESS_OUTCOME_EXITED', 'PROCESS_OUTCOME_TIMEOUT', 'PROCESS_OUTCOME_CANCELLED'];

/** Converts an exit reported by the agent to the outcome of the session. */
function endOf({ outcome, exit_code, ...exit }: ProcessExit__Output, session: Session, link: Link): End {
  const reason = exit.reason.slice(0, 4096) || null;
  if (outcome === 'PROCESS_OUTCOME_NOT_STARTED') return { reason: reason ?? 'could not start' };
  if (outcome === 'PROCESS_OUTCOME_LOST' && reason) return { reason };
  if (!ran.includes(outcome)) return lostOn(session, link);
  const signal = /^[\x20-\x7e]{1,32}$/.test(exit.signal) ? exit.signal : null;
  if (session.ending) return { exit_code, signal, reason: 'ended' };
  return { exit_code, signal, reason: reason ?? (outcome === 'PROCESS_OUTCOME_EXITED' ? null : 'ended') };
}

/**
 * Returns the outcome of a session whose terminal the agent no longer has. A terminal ends with the agent process that
 * opened it.
 */
function lostOn({ instance_id }: Session, { instanceId }: Link): End {
  return { reason: instance_id === instanceId ? 'lost' : 'agent_restarted' };
}

/**
 * Decides what to do after a refused call. Returns the outcome of the session if the terminal did not start or no
 * longer exists, and undefined if the call should be repeated.
 */
function refusalOf(error: unknown, unopened: boolean, session: Session, link: Link): End | undefined {
  if (!(error instanceof AppError)) return undefined;
  // The terminal may exist in spite of these errors, so the call is repeated.
  const unsure = ['machine_offline', 'machine_timeout'];
  // After `unavailable`, a terminal that was to be opened does not exist. But a terminal that was open already may
  // still exist, so the call for it is repeated.
  if (!unopened) unsure.push('unavailable');
  if (unsure.includes(error.code)) return undefined;
  return unopened ? { reason: `${error.code}: ${error.message}` } : lostOn(session, link);
}

// Attaches clients of terminals, by ticket or gRPC call, and serves each one until it disconnects.
import type { Caller, Journal } from '../../shared/api/route-table.ts';
import { after, now } from '../../shared/clock.ts';
import { terminalClients } from '../../shared/command-and-terminal-limits.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import type { HistoryTransaction } from '../history/history-database.ts';
import { Conversation, endOf } from './serve-terminal-client.ts';
import { emitEvent, type OpenSession, type SessionContext, sessionsOn } from './session.ts';
import type { Attached, Mode, Session } from './session-records.ts';
import type { ClientPort, CloseReason } from './terminal-client.ts';

export interface AttachParams {
  mode: Mode;
  /** Offset of the first byte of output that the client wants. By default the client gets the last 256 KiB. */
  offset?: number | undefined;
}

/** An attached client that does not open its connection within this number of milliseconds is detached. */
export const unusedMs = 30_000;
/** Milliseconds after the end of a session in which a client may read the rest of the output. */
const drainMs = 30_000;

/**
 * Attaches a client, which must connect within 30 s. Throws unavailable if the machine has too many clients.
 */
export async function attach(
  context: SessionContext,
  session: OpenSession,
  { mode, offset }: AttachParams,
  caller: Caller,
): Promise<Attachment> {
  const { id: session_id, machine_id } = session.record;
  const attachedHere = sessionsOn(machine_id, context).flatMap(({ clients }) => [...clients.keys()]);
  if (attachedHere.length >= terminalClients) {
    const message = `${terminalClients} clients are attached to sessions of machine ${machine_id}, and no more are allowed: detach one first`;
    throw new AppError('unavailable', message, { machine_id, limit: terminalClients });
  }
  const { key_id, key_name, login_id, request_id, address } = caller;
  const client_id = newId('client');
  const attached = { client_id, session_id, key_id, key_name, mode, attached_at: now(), request_id };
  const attachment = new Attachment(context, session, attached, { address, login_id, offset });
  session.clients.set(client_id, attachment);
  try {
    await context.history.write((transaction) => {
      transaction.about(machine_id);
      context.records.attach(attached, transaction);
      emitEvent(transaction, 'session.client_attached', session.record, context, { client_id, mode });
      caller.commit(transaction, { client_id, mode });
    });
  } catch (error) {
    session.clients.delete(client_id);
    throw error;
  }
  attachment.begin();
  return attachment;
}

/** Deletes the record of a client and emits session.client_detached. */
export function recordDetached(
  transaction: HistoryTransaction,
  { client_id, mode }: Attached,
  session: Session,
  context: SessionContext,
): void {
  transaction.about(session.machine_id);
  context.records.detach(client_id, transaction);
  emitEvent(transaction, 'session.client_detached', session, context, { client_id, mode });
}

/** A client of a session, from its attachment until it is detached. */
export class Attachment {
  readonly attached: Attached;
  readonly session: OpenSession;
  /** Offset of the first byte of output that the client wants. */
  readonly offset: number | undefined;
  readonly #client: Pick<Caller, 'address' | 'login_id'>;
  readonly #context: SessionContext;
  readonly #end = new AbortController();
  #reason: CloseReason | undefined;
  #served = false;
  #left: Promise<void> | undefined;
  #stopWatchingRights = (): void => {};
  /**
   * Cancels the timer that detaches the client. Before the client connects, the timer runs for `unusedMs`. After the
   * end of the session, the client has `drainMs` to read the rest of the output.
   */
  #cancelTimer = (): void => {};

  constructor(
    context: SessionContext,
    session: OpenSession,
    attached: Attached,
    { offset, ...client }: Pick<Caller, 'address' | 'login_id'> & { offset: number | undefined },
  ) {
    this.#context = context;
    this.session = session;
    this.attached = attached;
    this.offset = offset;
    this.#client = client;
  }

  /** True from the attachment of the client until it opens its connection, such as a WebSocket, or is detached. */
  get waiting(): boolean {
    return !this.#served && !this.#left;
  }

  /**
   * Starts the timeout for the client's connection, and watches the rights of its key. Must be called when the record
   * of the client is on disk.
   */
  begin(): void {
    const { key_id } = this.attached;
    const { login_id } = this.#client;
    const { machine_id } = this.session.record;
    this.#cancelTimer = after(unusedMs, () => this.leave());
    this.#stopWatchingRights = this.#context.whileAttachable({ key_id, login_id, machine_id }, () => {
      void this.detach('forbidden');
    });
    if (this.#left) this.#stopWatchingRights();
  }

  /** Serves the client until it is detached. Must be called only once. Never rejects. */
  async serve(port: ClientPort): Promise<void> {
    if (!this.waiting) return port.close(this.#reason ?? { why: 'detached' });
    this.#served = true;
    this.#cancelTimer();
    if (this.session.over) this.sessionEnded();
    const signal = AbortSignal.any([this.#end.signal, port.gone]);
    const reason = await new Conversation(this, port, signal, this.#context.log).run();
    if (!port.gone.aborted) port.close(this.#reason ?? reason);
    await this.#close(reason);
  }

  /** Detaches a client that will not connect. */
  leave(): void {
    void this.detach('detached');
  }

  /** Detaches the client. Resolves when that is on disk. Never rejects. */
  detach(why: 'detached' | 'forbidden' | 'stopping'): Promise<void> {
    return this.#close({ why });
  }

  sessionEnded(): void {
    this.#cancelTimer();
    this.#cancelTimer = after(drainMs, () => void this.#close(endOf(this.session)));
  }

  /** Writes an action to the audit log. A failed write is only logged, because a full disk must not stop a terminal. */
  audit(action: string, result: string): void {
    const { log, history } = this.#context;
    history
      .write((journal) => this.#record(journal, action, result))
      .catch((error: unknown) =>
        log.error(
          { err: error, action },
          'an action of a terminal client could not be written to the audit log',
        ),
      );
  }

  /** Detaches the client. Only the reason of the first call counts. */
  #close(reason: CloseReason): Promise<void> {
    this.#reason ??= reason;
    this.#end.abort();
    this.#cancelTimer();
    this.#stopWatchingRights();
    this.#left ??= this.#recordLeaving();
    return this.#left;
  }

  async #recordLeaving(): Promise<void> {
    const { attached, session } = this;
    const { history, log } = this.#context;
    session.clients.delete(attached.client_id);
    // If another broker now owns the machine, that broker records that the client was detached.
    if (!history.owns(session.record.machine_id)) return;
    try {
      await history.write((transaction) => {
        recordDetached(transaction, attached, session.record, this.#context);
        this.#record(transaction, 'sessions.leave', 'ok');
      });
    } catch (error) {
      log.error(
        { err: error, client_id: attached.client_id },
        'a terminal client was detached, but this could not be stored',
      );
    }
    session.closeIfUnread();
  }

  #record(journal: Journal, action: string, result: string): void {
    const { key_id, key_name, request_id, session_id, client_id, mode } = this.attached;
    const { machine_id } = this.session.record;
    const what = { session_id, client_id, mode };
    const deed = { key_id, key_name, action, machine_id, what, request_id, result, ...this.#client };
    this.#context.audit(journal, deed);
  }
}

// Who is attached to which session: from the ticket, or the call, that let them in, to their leaving.
import { createHash } from 'node:crypto';
import type { Deed } from '../../shared/api/audit.ts';
import type { Caller, Journal } from '../../shared/api/index.ts';
import type { KeyId, MachineId, SessionId } from '../../shared/api/route.ts';
import { after, monotonic, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId, newSecret } from '../../shared/ids.ts';
import { terminalClients } from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
import type { History } from '../history.ts';
import type { ClientPort, Parting } from './client.ts';
import type { Life } from './life.ts';
import type { Attached, Mode, Records, Session } from './records.ts';
import type { Client, Run, Runs } from './run.ts';
import { serve } from './serving.ts';

/** A client that was let in and is yet to be served, by whatever carries it. */
export interface Attachment {
  readonly session_id: SessionId;
  readonly client_id: string;
  readonly mode: Mode;
  /** Serves it until it is over. Once only. Never rejects. */
  serve(port: ClientPort): Promise<void>;
  /** It will never be served. */
  leave(): void;
}

export interface AttachWish {
  mode: Mode;
  /** First byte of output wanted; the last 256 KiB unless told. */
  offset?: number | undefined;
}

export interface Clients {
  attach(run: Run, wish: AttachWish, caller: Caller): Promise<Attaching>;
  /** What lets whoever shows it be served, once, within 30 s. */
  ticketFor(attachment: Attaching): string;
  redeem(ticket: string): Attachment | undefined;
  /** Those whom an earlier broker served are told of as detached; inside a transaction. */
  takeLeaveOf(journal: Journal, client: Attached, session: Session): void;
}

export interface ClientRooms {
  history: History;
  records: Records;
  life: Life;
  runs: Runs;
  audit(journal: Journal, deed: Deed): void;
  /** Calls `end` once a key may no longer take part. The result stops that. */
  whileAttachable(intent: { key_id: KeyId; machine_id: MachineId }, end: () => void): () => void;
  /** Nobody reads a session any more that is over. */
  settled(run: Run): void;
}

/** A client that nobody serves within this time is let go. */
const unusedMs = 30_000;
/** What is audited of typing: that there was some, once in this time. */
const auditMs = 60_000;
/** After the end of its session a client gets this long to take the rest. */
const restMs = 30_000;

export function openClients(rooms: ClientRooms, log: Logger): Clients {
  const { history, records, life } = rooms;
  /** By the hash of their tickets. */
  const tickets = new Map<string, Attaching>();

  function audit(journal: Journal, action: string, { attached, address, run }: Party, result = 'ok'): void {
    const { key_id, key_name, request_id, session_id, client_id, mode } = attached;
    const what = { session_id, client_id, mode };
    const { machine_id } = run.session;
    rooms.audit(journal, { key_id, key_name, action, machine_id, what, request_id, address, result });
  }

  function tell(
    journal: Journal,
    type: 'session.client_attached' | 'session.client_detached',
    { attached, run }: Pick<Party, 'attached' | 'run'>,
  ): void {
    const { client_id, mode } = attached;
    life.tell(journal, type, run.session, { client_id, mode });
  }

  /** What is only to be remembered: a full disk lets nobody down. */
  function note(action: string, party: Party, result?: string): void {
    history
      .write((journal) => audit(journal, action, party, result))
      .catch((error: unknown) => log.error({ err: error, action }, 'not audited'));
  }

  async function left(party: Party): Promise<void> {
    const { attached, run } = party;
    run.clients.delete(attached.client_id);
    try {
      await history.write((journal) => {
        records.detach(attached.client_id);
        tell(journal, 'session.client_detached', party);
        audit(journal, 'sessions.leave', party);
      });
    } catch (error) {
      log.error({ err: error, client_id: attached.client_id }, 'a detached client could not be written');
    }
    if (run.over && run.clients.size === 0) rooms.settled(run);
  }

  return {
    async attach(run, { mode, offset }, caller) {
      const { id: session_id, machine_id } = run.session;
      if (rooms.runs.clientsOn(machine_id) >= terminalClients) {
        throw new AppError('unavailable', `${terminalClients} clients are attached on this machine already`, {
          machine_id,
          limit: terminalClients,
        });
      }
      const { key_id, key_name, request_id, address } = caller;
      const client_id = newId('client');
      const attached = { client_id, session_id, key_id, key_name, mode, attached_at: now(), request_id };
      const attachment = new Attaching({ attached, address, run }, offset, { left, note, life, log });
      run.clients.set(client_id, attachment);
      try {
        await history.write((journal) => {
          records.attach(attached);
          tell(journal, 'session.client_attached', { attached, run });
          caller.commit(journal, { client_id, mode });
        });
      } catch (error) {
        run.clients.delete(client_id);
        throw error;
      }
      attachment.begin(rooms.whileAttachable);
      return attachment;
    },
    ticketFor(attachment) {
      const ticket = newSecret();
      const hash = hashOf(ticket);
      tickets.set(hash, attachment);
      after(unusedMs, () => tickets.delete(hash));
      return ticket;
    },
    redeem(ticket) {
      const hash = hashOf(ticket);
      const attachment = tickets.get(hash);
      tickets.delete(hash);
      return attachment?.waiting ? attachment : undefined;
    },
    takeLeaveOf(journal, attached, session) {
      records.detach(attached.client_id);
      const { client_id, mode } = attached;
      life.tell(journal, 'session.client_detached', session, { client_id, mode });
    },
  };
}

/** A client, where it came from, and its session. */
interface Party {
  attached: Attached;
  address: string;
  run: Run;
}

interface AttachingHooks {
  left(party: Party): Promise<void>;
  note(action: string, party: Party, result?: string): void;
  life: Life;
  log: Logger;
}

class Attaching implements Attachment, Client {
  readonly attached: Attached;
  readonly #address: string;
  readonly #run: Run;
  readonly #offset: number | undefined;
  readonly #hooks: AttachingHooks;
  readonly #end = new AbortController();
  #parting: Parting | undefined;
  #served = false;
  #left: Promise<void> | undefined;
  #stopJudging = (): void => {};
  #cancelUnused = (): void => {};
  #cancelRest = (): void => {};

  constructor({ attached, address, run }: Party, offset: number | undefined, hooks: AttachingHooks) {
    this.attached = attached;
    this.#address = address;
    this.#run = run;
    this.#offset = offset;
    this.#hooks = hooks;
  }

  get session_id(): SessionId {
    return this.attached.session_id;
  }

  get client_id(): string {
    return this.attached.client_id;
  }

  get mode(): Mode {
    return this.attached.mode;
  }

  get #party(): Party {
    return { attached: this.attached, address: this.#address, run: this.#run };
  }

  /** It is yet to be served. */
  get waiting(): boolean {
    return !this.#served && !this.#left;
  }

  /** It is on disk: from now on it can end. */
  begin(whileAttachable: ClientRooms['whileAttachable']): void {
    const { machine_id } = this.#run.session;
    this.#cancelUnused = after(unusedMs, () => this.leave());
    this.#stopJudging = whileAttachable({ key_id: this.attached.key_id, machine_id }, () => {
      void this.dismiss('forbidden');
    });
    if (this.#left) this.#stopJudging();
  }

  async serve(port: ClientPort): Promise<void> {
    if (this.#served || this.#left) return port.part(this.#parting ?? { why: 'detached' });
    this.#served = true;
    this.#cancelUnused();
    const { attached } = this;
    const { life, log } = this.#hooks;
    const run = this.#run;
    const hooks = {
      typed: this.#oncePerMinute('sessions.input'),
      refused: this.#oncePerMinute('sessions.input', 'forbidden'),
      resized: (size: { cols: number; rows: number }) => life.resized(run, size),
    };
    const signal = AbortSignal.any([this.#end.signal, port.gone]);
    const parting = await serve({ run, attached, offset: this.#offset, port, hooks, log }, signal);
    if (!port.gone.aborted) port.part(this.#parting ?? parting);
    await this.#leave();
  }

  leave(): void {
    void this.dismiss('detached');
  }

  dismiss(why: 'detached' | 'forbidden' | 'stopping'): Promise<void> {
    this.#parting ??= { why };
    this.#end.abort();
    return this.#leave();
  }

  ended(): void {
    this.#cancelRest = after(restMs, () => {
      const { exit_code, signal, reason } = this.#run.session;
      this.#parting ??= { why: 'ended', exit_code, signal, reason };
      this.#end.abort();
      void this.#leave();
    });
  }

  #leave(): Promise<void> {
    this.#cancelUnused();
    this.#cancelRest();
    this.#stopJudging();
    this.#left ??= this.#hooks.left(this.#party);
    return this.#left;
  }

  /** Tells in the log and the audit that it happens. */
  #oncePerMinute(action: string, result?: string): () => void {
    let last = Number.NEGATIVE_INFINITY;
    return () => {
      if (monotonic() - last < auditMs) return;
      last = monotonic();
      const { attached } = this;
      if (result) this.#hooks.log.info({ client_id: attached.client_id }, 'an observer tried to take part');
      this.#hooks.note(action, this.#party, result);
    };
  }
}

function hashOf(ticket: string): string {
  return createHash('sha256').update(ticket).digest('hex');
}

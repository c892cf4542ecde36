// REST handlers of sessions, and entry points for terminal clients over WebSocket and gRPC.
import { hash } from 'node:crypto';
import type { Caller, Handlers, Input, Reply } from '../../shared/api/route-table.ts';
import type { MachineId, SessionId } from '../../shared/api/shared-schemas.ts';
import { sessions as routes } from '../../shared/api/terminal-sessions.ts';
import { after, iso, isoOrNull, now } from '../../shared/clock.ts';
import { openTerminals } from '../../shared/command-and-terminal-limits.ts';
import { AppError } from '../../shared/errors.ts';
import { isId, newId, newSecret } from '../../shared/ids-and-secrets.ts';
import type { Logger } from '../../shared/logger.ts';
import { Acknowledgements } from '../link/acknowledge-results.ts';
import { filtersOf, pageOfRows, reachableOnly } from '../list-pages-and-filters.ts';
import type { Link } from '../presence/index.ts';
import { type Attachment, type AttachParams, attach, recordDetached, unusedMs } from './attach-clients.ts';
import { emitEvent, endUnknown, OpenSession, type SessionContext, sessionsOn } from './session.ts';
import { type Attached, columns, type Session, SessionRecords, sessionOf } from './session-records.ts';
import type { SessionServices } from './session-services.ts';

interface SessionSettings {
  /** Sessions that ended more than this many milliseconds ago are deleted. */
  keepMs: number;
  publicUrl(): string;
}

type Routes = typeof routes;

/** Milliseconds that the handlers `create` and `end` wait for the machine. */
const answerMs = 10_000;

export class Sessions {
  readonly handlers: Handlers['sessions'] = {
    create: async (params, caller) => {
      const session = await this.#store(params, caller);
      const { shell = '', args = [], cwd = '', env = {}, cols, rows, grace_period, machine_id } = params;
      const spec = { program: shell, args, cwd, env, size: { cols, rows }, grace_ms: grace_period };
      // The machine may have been removed while the session was written to the disk.
      if (!this.#context.state.machines.has(machine_id)) void session.end({ reason: 'machine_removed' });
      else session.open(spec, caller);
      await session.until(() => session.written !== 'PENDING', answerMs, caller.signal);
      return this.#detail(session.record.id);
    },
    list: async (input, caller) => {
      const { session_id } = input;
      const own = { session_id: session_id ? (['id = ?', session_id] as const) : undefined };
      const conditions = [reachableOnly(caller.reachable()), ...filtersOf(routes.list, input, own)];
      const from = { table: 'sessions', columns };
      const page = await pageOfRows(this.#context.history, from, conditions, input);
      return { items: page.items.map((row) => this.#serialize(sessionOf(row))), total: page.total };
    },
    get: ({ session_id }) => this.#detail(session_id),
    attach: async (params, caller) => {
      const attachment = await this.join(params, caller);
      const { session_id, client_id, mode, attached_at } = attachment.attached;
      const ticket = newSecret();
      const hashed = hashOf(ticket);
      this.#tickets.set(hashed, attachment);
      after(unusedMs, () => this.#tickets.delete(hashed));
      const base = this.#publicUrl().replace(/^http/, 'ws').replace(/\/+$/, '');
      const stream_url = `${base}/api/v1/sessions/${session_id}/stream?ticket=${ticket}`;
      return { session_id, client_id, mode, attached_at: iso(attached_at), stream_url };
    },
    detach: async ({ session_id, client_id }, { key_id }) => {
      const all = [...(this.#context.sessions.get(session_id)?.clients.values() ?? [])];
      const found = all.filter(({ attached }) =>
        client_id === undefined ? attached.key_id === key_id : attached.client_id === client_id,
      );
      const [client] = found;
      if (client && found.length === 1) {
        await client.detach('detached');
        return { detached: true };
      }
      if (client_id !== undefined) {
        const message = `client ${client_id} is not attached to session ${session_id}`;
        throw new AppError('client_not_found', message, { client_id });
      }
      const client_ids = found.map(({ attached }) => attached.client_id);
      const count = client ? `${found.length} clients` : 'no client';
      const message = `this key has ${count} attached to session ${session_id}: set client_id to the id of the client to detach`;
      throw new AppError('invalid_request', message, { client_ids });
    },
    end: async ({ session_id }, caller) => {
      const session = this.#context.sessions.get(session_id);
      if (session && !session.ended) {
        await session.requestEnd(caller);
        await session.until(() => session.over, answerMs, caller.signal);
      }
      const detail = await this.#detail(session_id);
      // The machine is moving to another broker, which does not know of this request.
      if (!this.#context.sessions.has(session_id)) await this.#assertEnded(session_id);
      return detail;
    },
  };
  readonly #context: SessionContext;
  readonly #publicUrl: () => string;
  /** Maps the hash of a ticket to the attached client. The client must still open its WebSocket with this ticket. */
  readonly #tickets = new Map<string, Attachment>();
  readonly #stopping = new AbortController();
  readonly #stops: (() => void)[];

  private constructor(
    services: SessionServices & { records: SessionRecords },
    publicUrl: () => string,
    log: Logger,
  ) {
    const { presence, events } = services;
    this.#publicUrl = publicUrl;
    this.#context = {
      ...services,
      sessions: new Map(),
      acknowledgements: new Acknowledgements(presence, log),
      stopping: this.#stopping.signal,
      log,
    };
    this.#stops = [
      presence.watch((machineId) => this.#relink(machineId)),
      events.listen(['machine.removed'], ({ data }) => {
        for (const session of sessionsOn(String(data.machine_id), this.#context))
          if (session.stored) void session.end({ reason: 'machine_removed' });
      }),
    ];
  }

  /**
   * Opens the records of sessions. A single broker also recovers the sessions that its earlier process left open. With
   * several brokers, a broker recovers the sessions of a machine when it becomes the owner of the machine.
   */
  static async open(
    services: SessionServices,
    { keepMs, publicUrl }: SessionSettings,
    log: Logger,
  ): Promise<Sessions> {
    const records = await SessionRecords.open(services.history, keepMs);
    const sessions = new Sessions({ ...services, records }, publicUrl, log);
    if (services.cluster)
      services.cluster.join({
        adopt: (machineIds) => sessions.#load(machineIds),
        drop: (machineId) => {
          for (const session of sessionsOn(machineId, sessions.#context)) session.drop();
        },
      });
    else await sessions.#load();
    return sessions;
  }

  /** Finds the machine of a session: `open` looks in memory, `stored` in the history. */
  readonly machineOf = {
    open: (id: string): MachineId | undefined => this.#context.sessions.get(id)?.record.machine_id,
    stored: async (id: string): Promise<MachineId | undefined> =>
      (await this.#context.records.find(id))?.machine_id,
  };

  /** Finds the client for which POST attach returned this ticket. A ticket works only once, and only for 30 s. */
  redeem(ticket: string): Attachment | undefined {
    const hashed = hashOf(ticket);
    const attachment = this.#tickets.get(hashed);
    this.#tickets.delete(hashed);
    return attachment?.waiting ? attachment : undefined;
  }

  /** Attaches a client without a ticket. Throws session_not_found, forbidden, conflict or unavailable. */
  async join(params: AttachParams & { session_id: string }, caller: Caller): Promise<Attachment> {
    const { session_id } = params;
    // Nothing may be awaited between this check and attach(), because the session could end meanwhile.
    const session = this.#context.sessions.get(session_id);
    if (!session?.stored || session.ended) return await this.#refuse(session_id);
    if (caller.reaches(session.record.machine_id)) return attach(this.#context, session, params, caller);
    throw new AppError('forbidden', 'this key is not allowed to use the machine of this session', {
      session_id,
    });
  }

  /** Detaches every client and ends every wait. The terminals on the machines keep running. */
  async stop(): Promise<void> {
    for (const stop of this.#stops) stop();
    this.#stopping.abort();
    await Promise.all([...this.#context.sessions.values()].map((session) => session.stop()));
  }

  /**
   * Passes the new link of a machine to the machine's sessions. Ends each terminal that the agent still runs without an
   * open session.
   */
  #relink(machineId: string): void {
    const { sessions, presence } = this.#context;
    const link = presence.find(machineId);
    for (const session of sessionsOn(machineId, this.#context)) session.relink(link);
    for (const id of link?.processIds ?? [])
      if (link && isId('session', id) && (sessions.get(id)?.over ?? true))
        endUnknown(link, id, this.#context);
  }

  /**
   * Recovers the sessions that another broker process left open on `machineIds`, or on all machines. Each session then
   * waits for the link of its machine. Clients of that process are recorded as detached.
   */
  async #load(machineIds?: readonly string[]): Promise<void> {
    const { records, sessions, history, state, log } = this.#context;
    const open = (await records.open(machineIds)).filter(
      ({ id, machine_id }) => !sessions.has(id) && history.owns(machine_id),
    );
    const loaded = open.map((record) => new OpenSession(this.#context, record, true));
    const left = await records.attached(machineIds);
    if (left.length > 0)
      this.#recordLeft(left).catch((err: unknown) =>
        log.error({ err }, 'clients of an earlier broker process could not be recorded as detached'),
      );
    for (const session of loaded) {
      if (state.machines.has(session.record.machine_id)) session.awaitLink();
      else void session.end({ reason: 'machine_removed' });
    }
  }

  async #recordLeft(left: readonly Attached[]): Promise<void> {
    const { history, records } = this.#context;
    await history.write(async (transaction) => {
      for (const client of left) {
        const session = await records.find(client.session_id, transaction);
        if (session) recordDetached(transaction, client, session, this.#context);
      }
    });
  }

  /**
   * Writes a new session to the disk. During the write, the session already counts toward the machine's limit of open
   * sessions. Throws if the limit is reached, or if the machine cannot open terminals.
   */
  async #store(params: Input<Routes['create']>, caller: Caller): Promise<OpenSession> {
    const { machine_id, shell = null, grace_period, cols, rows } = params;
    const { history, records, sessions, machineFacts } = this.#context;
    const { instanceId: instance_id } = this.#linkForNew(machine_id);
    const facts = machineFacts.of(machine_id);
    const unconnected = { connected_at: null, grace_period_started_at: null, ended_at: null };
    const record: Session = {
      ...unconnected,
      ...{ id: newId('session') as SessionId, machine_id, machine_hostname: facts?.hostname ?? '' },
      ...{ shell, grace_period, cols, rows, status: 'PENDING', created_at: now() },
      ...{ exit_code: null, signal: null, reason: null, ending: false, sent_to: 0 },
      last_heartbeat_at: facts?.last_seen ?? null,
      requested_by: caller.key_id,
      instance_id,
    };
    const session = new OpenSession(this.#context, record, false);
    try {
      await history.write((transaction) => {
        records.put(record, transaction);
        emitEvent(transaction, 'session.created', record, this.#context);
        caller.commit(transaction, { session_id: record.id });
      });
    } catch (error) {
      sessions.delete(record.id);
      throw error;
    }
    session.stored = true;
    return session;
  }

  /** Returns the link of a machine. Throws if the machine cannot have another session. */
  #linkForNew(machine_id: MachineId): Link {
    const { presence, machineFacts } = this.#context;
    const link = presence.get(machine_id);
    machineFacts.assertAllows(machine_id, ['terminal']);
    // An agent that cannot load node-pty does not list this method, because it cannot open terminals.
    const method = 'OpenTerminal';
    const message = `the agent on machine ${machine_id} cannot open terminals; update or reinstall it`;
    if (!link.methods.includes(method)) throw new AppError('not_supported', message, { machine_id, method });
    const open = sessionsOn(machine_id, this.#context).filter(({ over }) => !over);
    if (open.length >= openTerminals) {
      const message = `machine ${machine_id} already has ${openTerminals} open sessions, the most allowed: end one of them and try again`;
      throw new AppError('unavailable', message, { machine_id, limit: openTerminals });
    }
    return link;
  }

  async #detail(session_id: string): Promise<Reply<Routes['get']>> {
    const { sessions, records } = this.#context;
    const open = sessions.get(session_id);
    const clients = [...(open?.clients.values() ?? [])];
    const attached_clients = clients.map(({ attached: { client_id, key_name, mode, attached_at } }) => ({
      client_id,
      key_name,
      mode,
      attached_at: iso(attached_at),
    }));
    return { ...this.#serialize(open?.record ?? (await records.get(session_id))), attached_clients };
  }

  /** Converts a record to the JSON of the REST API. For an open session, the newest values are in memory. */
  #serialize(stored: Session) {
    const open = this.#context.sessions.get(stored.id);
    const { instance_id: _, ending: __, sent_to: ___, ...record } = open?.record ?? stored;
    const facts = this.#context.machineFacts.of(record.machine_id);
    const live = open?.link && !open.ended ? facts?.last_seen : undefined;
    return {
      ...record,
      session_id: record.id,
      created_at: iso(record.created_at),
      connected_at: isoOrNull(record.connected_at),
      last_heartbeat_at: isoOrNull(live ?? record.last_heartbeat_at),
      grace_period_started_at: isoOrNull(record.grace_period_started_at),
      ended_at: isoOrNull(record.ended_at),
      attached_count: open?.clients.size ?? 0,
    };
  }

  /**
   * Throws the error that says why no client can attach to a session: session_not_found, conflict if the session has
   * ended, or unavailable if no broker has loaded it yet.
   */
  async #refuse(session_id: string): Promise<never> {
    if (!this.#context.sessions.has(session_id)) await this.#assertEnded(session_id);
    throw new AppError('conflict', `session ${session_id} has ended; create another`, { session_id });
  }

  /**
   * Throws unavailable if a session that is not in memory is open. The broker that owned its machine has then stopped,
   * and the next owner has not loaded the session yet.
   */
  async #assertEnded(session_id: string): Promise<void> {
    const { status } = await this.#context.records.get(session_id);
    if (status === 'DISCONNECTED') return;
    const message = 'no broker is responsible for the machine of this session yet: try again';
    throw new AppError('unavailable', message, { session_id, retry_after: 1 });
  }
}

const hashOf = (ticket: string): string => hash('sha256', ticket);

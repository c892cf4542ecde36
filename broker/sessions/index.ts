// Sessions over REST, and the way in for the transports of their clients: terminals that outlive both links.
import type { Caller, Handlers, Input } from '../../shared/api/index.ts';
import type { MachineId, SessionId } from '../../shared/api/route.ts';
import type { sessions as routes } from '../../shared/api/sessions.ts';
import { iso, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { isId, newId } from '../../shared/ids.ts';
import { openTerminals } from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Link } from '../presence/index.ts';
import { type Attachment, type AttachParams, attach, recordDetached, Tickets } from './clients.ts';
import { SessionRecords } from './records.ts';
import { serializer } from './serialize.ts';
import {
  emitEvent,
  endStray,
  linkTo,
  OpenSession,
  type SessionContext,
  type SessionServices,
  sessionsOn,
} from './session.ts';

export interface Sessions {
  handlers: Handlers['sessions'];
  /** The machine a session belongs to. */
  machineOf(id: string): MachineId | undefined;
  /** For the WebSocket: the client that a ticket of POST attach lets in; it is good once, within 30 s. */
  redeem(ticket: string): Attachment | undefined;
  /** For gRPC: attaches without a ticket. Throws session_not_found, forbidden, conflict or unavailable. */
  join(params: AttachParams & { session_id: string }, caller: Caller): Promise<Attachment>;
  /** Lets every client go and ends every wait; terminals live on. */
  stop(): Promise<void>;
}

interface SessionSettings {
  /** Sessions that ended longer ago go, in milliseconds. */
  keepMs: number;
  /** How people reach the REST API. */
  publicUrl(): string;
}

type Created = Input<(typeof routes)['create']>;

/** How long create and end wait for the machine. */
const answerMs = 10_000;
/** What an agent with terminals can do. */
const methods = ['OpenTerminal', 'KeepTerminal', 'AttachTerminal'];

/** Takes up what an earlier broker left open, too. */
export function openSessions(services: SessionServices, settings: SessionSettings, log: Logger): Sessions {
  const stopping = new AbortController();
  const context: SessionContext = {
    ...services,
    records: new SessionRecords(services.history, settings.keepMs),
    sessions: new Map(),
    stopping: stopping.signal,
    log,
  };
  const { records, sessions } = context;
  const tickets = new Tickets();
  const stopWatching = watchMachines(context);
  takeUp(context);
  return {
    machineOf: (id) => (sessions.get(id)?.record ?? records.find(id))?.machine_id,
    redeem: (ticket) => tickets.redeem(ticket),
    async join({ session_id, ...params }, caller) {
      const session = openSession(session_id, context);
      if (caller.reaches(session.record.machine_id)) return attach(context, session, params, caller);
      throw new AppError('forbidden', 'this key does not reach that machine', { session_id });
    },
    async stop() {
      stopWatching();
      stopping.abort();
      await Promise.all([...sessions.values()].map((session) => session.stop()));
    },
    handlers: {
      ...createAndEnd(context),
      ...attachAndDetach(context, tickets, settings),
      ...serializer(context),
    },
  };
}

/** Sessions follow the links of their machines, and end with them. The result stops that. */
function watchMachines(context: SessionContext): () => void {
  const { presence, events, sessions } = context;
  const stopWatching = presence.watch((machineId) => {
    const link = linkTo(machineId, context);
    for (const session of sessionsOn(machineId, context)) session.relink(link);
    const strays =
      link?.processIds.filter((id) => isId('session', id) && (sessions.get(id)?.over ?? true)) ?? [];
    for (const id of strays) if (link) endStray(link, id, context);
  });
  const stopListening = events.listen(({ type, data }) => {
    if (type !== 'machine.removed') return;
    for (const session of sessionsOn(String(data.machine_id), context)) {
      if (session.stored) void session.end({ reason: 'machine_removed' });
    }
  });
  return () => {
    stopWatching();
    stopListening();
  };
}

/** What an earlier broker had open is looked for again; its clients have gone. */
function takeUp(context: SessionContext): void {
  const { records, sessions, history, state, log } = context;
  for (const record of records.open()) new OpenSession(context, record, true);
  const left = records.attached();
  const written = history.write((journal) => {
    for (const client of left) {
      const session = records.find(client.session_id);
      if (session) recordDetached(journal, client, session, context);
    }
  });
  written.catch((error: unknown) => log.error({ err: error }, 'detached clients could not be written'));
  for (const session of sessions.values()) {
    if (state.machines.has(session.record.machine_id)) session.awaitLink();
    else void session.end({ reason: 'machine_removed' });
  }
}

/** One that has not ended. Throws session_not_found, or conflict. */
function openSession(session_id: string, { sessions, records }: SessionContext): OpenSession {
  const session = sessions.get(session_id);
  if (session?.stored && !session.ended) return session;
  if (!session) records.get(session_id);
  throw new AppError('conflict', 'this session has ended', { session_id });
}

function createAndEnd(context: SessionContext): Pick<Handlers['sessions'], 'create' | 'end'> {
  const { history, records, sessions, state, stopping } = context;
  const { get } = serializer(context);
  return {
    async create(params, caller) {
      const session = await store(params, caller, context);
      const { shell = '', args = [], cwd = '', env = {}, cols, rows, grace_period, machine_id } = params;
      const spec = { program: shell, args, cwd, env, size: { cols, rows }, grace_ms: grace_period };
      // It may have gone while the session was written.
      if (!state.machines.has(machine_id)) void session.end({ reason: 'machine_removed' });
      else session.open(spec, caller);
      const signal = AbortSignal.any([caller.signal, stopping]);
      await session.until(() => session.written !== 'PENDING', answerMs, signal);
      return get({ session_id: session.record.id });
    },
    async end({ session_id }, caller) {
      const session = sessions.get(session_id);
      if (!session || session.ended) return get({ session_id });
      const { ending } = session.record;
      // At once, so that no other change writes it without.
      session.record = { ...session.record, ending: true };
      const written = history.write((journal) => {
        if (!session.ended) records.put(session.record);
        caller.commit(journal);
      });
      await written.catch((error: unknown) => {
        session.record = { ...session.record, ending };
        throw error;
      });
      session.requestEnd(caller);
      await session.until(() => session.over, answerMs, AbortSignal.any([caller.signal, stopping]));
      return get({ session_id });
    },
  };
}

/** A new session on disk; it counts before that. Throws what keeps its machine from taking one. */
async function store(params: Created, caller: Caller, context: SessionContext): Promise<OpenSession> {
  const { machine_id, shell = null, grace_period, cols, rows } = params;
  const { instanceId: instance_id } = linkForNew(machine_id, context);
  const facts = context.machineFacts.of(machine_id);
  const session = new OpenSession(
    context,
    {
      id: newId('session') as SessionId,
      machine_id,
      machine_hostname: facts?.hostname ?? '',
      shell,
      status: 'PENDING',
      created_at: now(),
      connected_at: null,
      last_heartbeat_at: facts?.last_seen ?? null,
      grace_period,
      grace_period_started_at: null,
      ended_at: null,
      exit_code: null,
      signal: null,
      reason: null,
      cols,
      rows,
      requested_by: caller.key_id,
      instance_id,
      ending: false,
    },
    false,
  );
  const { record } = session;
  try {
    await context.history.write((journal) => {
      context.records.put(record);
      emitEvent(journal, 'session.created', record, context);
      caller.commit(journal, { session_id: record.id });
    });
  } catch (error) {
    context.sessions.delete(record.id);
    throw error;
  }
  session.stored = true;
  return session;
}

/** The link of a machine that can take another session. */
function linkForNew(machine_id: MachineId, context: SessionContext): Link {
  const link = context.presence.get(machine_id);
  if (!context.machineFacts.of(machine_id)?.capabilities.includes('terminal')) {
    const details = { machine_id, capability: 'terminal' };
    throw new AppError('permission_denied', 'the owner of this machine does not allow terminal', details);
  }
  const missing = methods.find((method) => !link.methods.includes(method));
  if (missing) {
    const details = { machine_id, method: missing };
    throw new AppError('not_supported', 'the agent on this machine has no terminals: update it', details);
  }
  const open = sessionsOn(machine_id, context).filter(({ over }) => !over);
  if (open.length >= openTerminals) {
    const message = `${openTerminals} sessions are open on this machine already: end one`;
    throw new AppError('unavailable', message, { machine_id, limit: openTerminals });
  }
  return link;
}

function attachAndDetach(
  context: SessionContext,
  tickets: Tickets,
  { publicUrl }: SessionSettings,
): Pick<Handlers['sessions'], 'attach' | 'detach'> {
  return {
    async attach({ session_id, ...params }, caller) {
      const attachment = await attach(context, openSession(session_id, context), params, caller);
      const { client_id, mode, attached_at } = attachment.attached;
      const base = publicUrl().replace(/^http/, 'ws').replace(/\/+$/, '');
      const stream_url = `${base}/api/v1/sessions/${session_id}/stream?ticket=${tickets.issue(attachment)}`;
      return { session_id, client_id, mode, attached_at: iso(attached_at), stream_url };
    },
    async detach({ session_id, client_id }, { key_id }) {
      const all = [...(context.sessions.get(session_id)?.clients.values() ?? [])];
      const found = all.filter(({ attached }) =>
        client_id === undefined ? attached.key_id === key_id : attached.client_id === client_id,
      );
      const [client] = found;
      if (client && found.length === 1) {
        await client.dismiss('detached');
        return { detached: true };
      }
      if (client_id !== undefined) {
        throw new AppError('client_not_found', 'no such client is attached to this session', { client_id });
      }
      const message = `${found.length} clients of this key are attached: name one`;
      throw new AppError('invalid_request', message, {
        client_ids: found.map(({ attached }) => attached.client_id),
      });
    },
  };
}

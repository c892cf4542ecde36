// Sessions over REST, and the way in for whatever carries their clients: terminals that outlive both links.
import type { Deed } from '../../shared/api/audit.ts';
import type { Caller, Handlers, Journal } from '../../shared/api/index.ts';
import type { KeyId, MachineId, SessionId } from '../../shared/api/route.ts';
import { after, iso, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import { openTerminals } from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { Link, Presence } from '../link/presence.ts';
import type { Vitals } from '../machines/vitals.ts';
import { pageOfRows, reachableOnly } from '../paging.ts';
import type { State } from '../state/index.ts';
import { type Attachment, type AttachWish, openClients } from './clients.ts';
import { openKeeping } from './keeping.ts';
import { openLife } from './life.ts';
import { fromRow, openRecords, type Records, type Session, type Wish } from './records.ts';
import { type Run, runOf, until } from './run.ts';

export type { ClientPort, Doing, Note, Parting } from './client.ts';
export type { Attachment } from './clients.ts';

export interface Sessions {
  handlers: Handlers['sessions'];
  /** The machine a session belongs to. */
  machineOf(id: string): MachineId | undefined;
  /** For the WebSocket: whom a ticket of POST attach lets in; it is good once, within 30 s. */
  redeem(ticket: string): Attachment | undefined;
  /** For gRPC: attaches without a ticket. Throws session_not_found, forbidden, conflict or unavailable. */
  join(input: AttachWish & { session_id: string }, caller: Caller): Promise<Attachment>;
  /** Lets every client go and wakes everybody who waits; terminals live on. */
  stop(): Promise<void>;
}

interface Rooms {
  state: State;
  history: History;
  events: Events;
  presence: Presence;
  vitals: Vitals;
  /** Records who did what, with the change. */
  audit(journal: Journal, deed: Deed): void;
  /** Calls `end` once a key may no longer take part in sessions there. The result stops that. */
  whileAttachable(intent: { key_id: KeyId; machine_id: MachineId }, end: () => void): () => void;
}

export interface SessionSettings {
  /** Sessions that ended longer ago go, in milliseconds. */
  keepMs: number;
  /** How people reach the REST API. */
  publicUrl(): string;
}

/** How long create and end wait for the machine. */
const answerMs = 10_000;
const methods = ['OpenTerminal', 'KeepTerminal', 'AttachTerminal'];

/** Opens the room, and takes up what an earlier broker left open. */
export function openSessions(rooms: Rooms, settings: SessionSettings, log: Logger): Sessions {
  const { state, history, events, presence, vitals } = rooms;
  const records = openRecords(history, settings.keepMs);
  const runs = new Map<string, Run>();
  const stopped = new AbortController();
  const runsOf = (machineId: string): Run[] =>
    [...runs.values()].filter(({ session }) => session.machine_id === machineId);
  const get = (id: string): Run | undefined => runs.get(id);

  function settled(run: Run): void {
    runs.delete(run.session.id);
    keeping.settled(run);
  }

  const life = openLife(
    { ...rooms, records },
    (run) => {
      for (const client of run.clients.values()) client.ended();
      if (run.clients.size === 0) settled(run);
    },
    log,
  );
  const stored = (machineId: string): Run[] => runsOf(machineId).filter((run) => run.stored);
  const keeping = openKeeping({ presence, life, runsOf: stored, get }, log);
  const countOn = (machineId: string): number =>
    runsOf(machineId).reduce((sum, { clients }) => sum + clients.size, 0);
  const clients = openClients({ ...rooms, records, life, countOn, settled }, log);

  function audit(journal: Journal, action: string, session: Session, caller: Caller): void {
    const { key_id, key_name, request_id } = caller;
    const { id: session_id, machine_id } = session;
    rooms.audit(journal, {
      key_id,
      key_name,
      action,
      machine_id,
      what: { session_id },
      request_id,
      result: 'ok',
    });
  }

  const removed = (run: Run): void => void life.ended(run, { reason: 'machine_removed' });

  /** What an earlier broker had open is looked for again; its clients have gone. */
  function takeUp(): void {
    for (const session of records.open()) runs.set(session.id, runOf(session, true));
    const left = records.attached();
    if (left.length > 0) {
      const leave = history.write((journal) => {
        for (const client of left) {
          const session = get(client.session_id)?.session ?? records.find(client.session_id);
          if (session) clients.takeLeaveOf(journal, client, session);
        }
      });
      leave.catch((error: unknown) => log.error({ err: error }, 'detached clients could not be written'));
    }
    for (const run of runs.values()) {
      if (!state.machines.has(run.session.machine_id)) removed(run);
      else life.away(run);
    }
  }

  /** The link of a machine that can take one more terminal. Throws before anything is kept. */
  function placeOn(machine_id: MachineId): Link {
    const link = presence.get(machine_id);
    if (!vitals.of(machine_id)?.capabilities.includes('terminal')) {
      throw new AppError('permission_denied', 'the owner of this machine does not allow terminal', {
        machine_id,
        capability: 'terminal',
      });
    }
    const missing = methods.find((method) => !link.methods.includes(method));
    if (missing) {
      throw new AppError('not_supported', 'the agent on this machine has no terminals: update it', {
        machine_id,
        method: missing,
      });
    }
    if (runsOf(machine_id).filter(({ over }) => !over).length >= openTerminals) {
      throw new AppError(
        'unavailable',
        `${openTerminals} sessions are open on this machine already: end one`,
        {
          machine_id,
          limit: openTerminals,
        },
      );
    }
    return link;
  }

  async function store(session: Session, caller: Caller): Promise<Run> {
    const run = runOf(session, false);
    runs.set(session.id, run);
    try {
      await history.write((journal) => {
        records.put(session);
        life.tell(journal, 'session.created', session);
        audit(journal, 'session.create', session, caller);
        caller.made(journal, session.id);
      });
    } catch (error) {
      runs.delete(session.id);
      throw error;
    }
    run.stored = true;
    return run;
  }

  /** One that has not ended. Throws session_not_found, or conflict. */
  function openRun(session_id: string): Run {
    const run = get(session_id);
    if (run && !run.ended) return run;
    if (!run) known(records, session_id);
    throw new AppError('conflict', 'this session has ended', { session_id });
  }

  function detail(session_id: string) {
    const run = get(session_id);
    const attached_clients = [...(run?.clients.values() ?? [])].map(({ attached }) => ({
      client_id: attached.client_id,
      key_name: attached.key_name,
      mode: attached.mode,
      attached_at: iso(attached.attached_at),
    }));
    return { ...shown(run?.session ?? known(records, session_id), run, vitals), attached_clients };
  }

  /** Waits until `test` holds, but no longer than the caller and the broker do. */
  async function waitFor(run: Run, test: () => boolean, caller: Caller): Promise<void> {
    const enough = new AbortController();
    const cancel = after(answerMs, () => enough.abort());
    await until(run, test, AbortSignal.any([enough.signal, caller.signal, stopped.signal]));
    cancel();
  }

  const stopListening = events.listen(({ type, data }) => {
    if (type === 'machine.removed') stored(String(data.machine_id)).forEach(removed);
  });
  takeUp();

  return {
    machineOf: (id) => get(id)?.session.machine_id ?? records.machineOf(id),
    redeem: (ticket) => clients.redeem(ticket),
    async join({ session_id, ...wish }, caller) {
      const run = openRun(session_id);
      if (!caller.reaches(run.session.machine_id)) {
        throw new AppError('forbidden', 'this key does not reach that machine', { session_id });
      }
      return clients.attach(run, wish, caller);
    },
    async stop() {
      stopped.abort();
      stopListening();
      life.stop();
      keeping.stop();
      const leaving: Promise<void>[] = [];
      for (const run of runs.values()) {
        run.cancelGrace();
        run.cancelResize();
        for (const client of run.clients.values()) leaving.push(client.dismiss('stopping'));
      }
      await Promise.all(leaving);
    },
    handlers: {
      async create(input, caller) {
        const link = placeOn(input.machine_id);
        const run = await store(sessionOf(input, link, vitals, caller), caller);
        // Both may have changed while it was written.
        if (!state.machines.has(input.machine_id)) removed(run);
        else keeping.open(run, specOf(input), caller.request_id);
        await waitFor(run, () => run.written !== 'PENDING', caller);
        return detail(run.session.id);
      },
      list(input, caller) {
        const page = pageOfRows(
          history,
          { table: 'sessions', columns: '*' },
          [
            reachableOnly(caller.reachable()),
            input.status && ['status = ?', input.status],
            input.machine_hostname ? ['machine_hostname = ?', input.machine_hostname] : undefined,
            input.machine_id && ['machine_id = ?', input.machine_id],
          ],
          input,
        );
        const items = page.items.map((row) => {
          const session = fromRow(row);
          const run = get(session.id);
          return shown(run?.session ?? session, run, vitals);
        });
        return { items, total: page.total };
      },
      get: ({ session_id }) => detail(session_id),
      async end({ session_id }, caller) {
        const run = get(session_id);
        if (!run || run.ended) return detail(session_id);
        run.session = { ...run.session, ending: true };
        await history.write((journal) => {
          if (!run.ended) records.put(run.session);
          audit(journal, 'session.end', run.session, caller);
        });
        keeping.end(run);
        await waitFor(run, () => run.over, caller);
        return detail(session_id);
      },
      async attach({ session_id, ...wish }, caller) {
        const attachment = await clients.attach(openRun(session_id), wish, caller);
        const { client_id, mode, attached_at } = attachment.attached;
        const ticket = clients.ticketFor(attachment);
        const stream_url = `${streamBase(settings.publicUrl())}/api/v1/sessions/${session_id}/stream?ticket=${ticket}`;
        return { session_id, client_id, mode, attached_at: iso(attached_at), stream_url };
      },
      async detach({ session_id, client_id }, caller) {
        const run = get(session_id);
        const all = [...(run?.clients.values() ?? [])];
        const own = all.filter(({ attached }) => attached.key_id === caller.key_id);
        const named =
          client_id === undefined ? own : all.filter(({ attached }) => attached.client_id === client_id);
        const [client, ...more] = named;
        if (client_id !== undefined && !client) {
          throw new AppError('client_not_found', 'no such client is attached to this session', { client_id });
        }
        if (!client || more.length > 0) {
          const clients = named.map(({ attached }) => attached.client_id);
          throw new AppError(
            'invalid_request',
            `${named.length} clients of this key are attached: name one`,
            {
              clients,
            },
          );
        }
        await client.dismiss('detached');
        return { detached: true };
      },
    },
  };
}

function known(records: Records, session_id: string): Session {
  const session = records.find(session_id);
  if (session) return session;
  throw new AppError('session_not_found', 'no such session', { session_id });
}

function sessionOf(wish: Wish, link: Link, vitals: Vitals, caller: Caller): Session {
  const facts = vitals.of(wish.machine_id);
  return {
    id: newId('session') as SessionId,
    machine_id: wish.machine_id,
    machine_hostname: facts?.hostname ?? '',
    shell: wish.shell ?? null,
    status: 'PENDING',
    created_at: now(),
    connected_at: null,
    last_heartbeat_at: facts?.last_seen ?? null,
    grace_period: wish.grace_period,
    grace_period_started_at: null,
    ended_at: null,
    exit_code: null,
    signal: null,
    reason: null,
    cols: wish.cols,
    rows: wish.rows,
    requested_by: caller.key_id,
    instance_id: link.instanceId,
    ending: false,
  };
}

function specOf({ shell = '', args = [], cwd = '', env = {}, cols, rows, grace_period }: Wish) {
  return { program: shell, args, cwd, env, size: { cols, rows }, grace_ms: grace_period };
}

/** A session as REST shows it. */
function shown({ instance_id: _, ending: __, ...session }: Session, run: Run | undefined, vitals: Vitals) {
  const { id, connected_at, grace_period_started_at, ended_at } = session;
  const live = run?.link && !run.ended ? vitals.of(session.machine_id)?.last_seen : undefined;
  const time = (ms: number | null): string | null => (ms === null ? null : iso(ms));
  return {
    ...session,
    session_id: id,
    created_at: iso(session.created_at),
    connected_at: time(connected_at),
    last_heartbeat_at: time(live ?? session.last_heartbeat_at),
    grace_period_started_at: time(grace_period_started_at),
    ended_at: time(ended_at),
    attached_count: run?.clients.size ?? 0,
  };
}

/** Where WebSockets are, from where REST is. */
function streamBase(publicUrl: string): string {
  return publicUrl.replace(/^http/, 'ws').replace(/\/+$/, '');
}

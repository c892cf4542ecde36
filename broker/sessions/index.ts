// Sessions over REST, and the way in for whatever carries their clients: terminals that outlive both links.
import type { Deed } from '../../shared/api/audit.ts';
import type { Caller, Handlers, Journal } from '../../shared/api/index.ts';
import type { KeyId, MachineId } from '../../shared/api/route.ts';
import { after, iso } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { Presence } from '../presence/index.ts';
import type { MachineFacts } from '../presence/machine-facts.ts';
import type { State } from '../state/index.ts';
import { type Attachment, type AttachWish, type Clients, openClients } from './clients.ts';
import { creator } from './creating.ts';
import { type Keeping, openKeeping } from './keeping.ts';
import { type Life, openLife } from './life.ts';
import { openRecords, type Records } from './records.ts';
import { type Client, type Run, Runs, runOf, until } from './run.ts';
import { known, type Shown, showing } from './shown.ts';

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

export interface SessionRooms {
  state: State;
  history: History;
  events: Events;
  presence: Presence;
  machineFacts: MachineFacts;
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

/** Everything inside. */
interface Room extends SessionRooms {
  records: Records;
  runs: Runs;
  life: Life;
  keeping: Keeping;
  clients: Clients;
  shown: Shown;
  /** Fires when the broker stops. */
  stopped: AbortSignal;
}

/** How long create and end wait for the machine. */
const answerMs = 10_000;

/** Opens the room, and takes up what an earlier broker left open. */
export function openSessions(rooms: SessionRooms, settings: SessionSettings, log: Logger): Sessions {
  const { events, presence } = rooms;
  const runs = new Runs();
  const records = openRecords(rooms.history, settings.keepMs);
  const settled = (run: Run): void => {
    runs.delete(run);
    keeping.settled(run);
  };
  const over = (run: Run): void => {
    for (const client of run.clients.values()) client.ended();
    if (run.clients.size === 0) settled(run);
  };
  const life = openLife({ ...rooms, records }, over, log);
  const keeping = openKeeping({ presence, life, runs }, log);
  const clients = openClients({ ...rooms, records, life, runs, settled }, log);
  const shown = showing({ ...rooms, records, runs });
  const stopped = new AbortController();
  const room: Room = { ...rooms, records, runs, life, keeping, clients, shown, stopped: stopped.signal };
  const stopListening = events.listen(({ type, data }) => {
    if (type !== 'machine.removed') return;
    for (const run of runs.on(String(data.machine_id))) if (run.stored) removed(run, room);
  });
  takeUp(room, log);

  return {
    machineOf: (id) => runs.get(id)?.session.machine_id ?? records.machineOf(id),
    redeem: clients.redeem,
    async join({ session_id, ...wish }, caller) {
      const run = openRun(session_id, room);
      if (caller.reaches(run.session.machine_id)) return clients.attach(run, wish, caller);
      throw new AppError('forbidden', 'this key does not reach that machine', { session_id });
    },
    async stop() {
      stopListening();
      keeping.stop();
      const leaving = runs.all().flatMap((run) => {
        run.cancelGrace();
        return [...run.clients.values()].map((client) => client.dismiss('stopping'));
      });
      await Promise.all([...leaving, life.stop(runs.all())]);
      stopped.abort();
    },
    handlers: {
      ...opening(room),
      ...attaching(room, settings),
      list: shown.list,
      get: ({ session_id }) => shown.detail(session_id),
    },
  };
}

/** What an earlier broker had open is looked for again; its clients have gone. */
function takeUp(room: Room, log: Logger): void {
  const { records, runs, history, state, clients, life } = room;
  for (const session of records.open()) runs.add(runOf(session, true));
  const left = records.attached().flatMap((client) => {
    const session = records.find(client.session_id);
    return session ? [{ client, session }] : [];
  });
  const told = history.write((journal) => {
    for (const { client, session } of left) clients.takeLeaveOf(journal, client, session);
  });
  told.catch((error: unknown) => log.error({ err: error }, 'detached clients could not be written'));
  for (const run of runs.all()) {
    if (state.machines.has(run.session.machine_id)) life.away(run);
    else removed(run, room);
  }
}

function removed(run: Run, { life }: Room): void {
  void life.ended(run, { reason: 'machine_removed' });
}

/** One that has not ended. Throws session_not_found, or conflict. */
function openRun(session_id: string, { runs, records }: Room): Run {
  const run = runs.get(session_id);
  if (run?.stored && !run.ended) return run;
  if (!run) known(records, session_id);
  throw new AppError('conflict', 'this session has ended', { session_id });
}

function opening(room: Room): Pick<Handlers['sessions'], 'create' | 'end'> {
  const { history, records, runs, keeping, shown } = room;

  /** Waits until `test` holds, but no longer than the caller and the broker do. */
  async function waitFor(run: Run, test: () => boolean, caller: Caller): Promise<void> {
    const enough = new AbortController();
    const cancel = after(answerMs, () => enough.abort());
    await until(run, test, AbortSignal.any([enough.signal, caller.signal, room.stopped]));
    cancel();
  }

  const create = creator(room);
  return {
    async create(input, caller) {
      const run = await create(input, caller);
      await waitFor(run, () => run.written !== 'PENDING', caller);
      return shown.detail(run.session.id);
    },
    async end({ session_id }, caller) {
      const run = runs.get(session_id);
      if (!run || run.ended) return shown.detail(session_id);
      const { ending } = run.session;
      // At once, so that no other change writes it without.
      run.session = { ...run.session, ending: true };
      const written = history.write((journal) => {
        if (!run.ended) records.put(run.session);
        caller.commit(journal);
      });
      await written.catch((error: unknown) => {
        run.session = { ...run.session, ending };
        throw error;
      });
      keeping.end(run, caller);
      await waitFor(run, () => run.over, caller);
      return shown.detail(session_id);
    },
  };
}

function attaching(
  room: Room,
  { publicUrl }: SessionSettings,
): Pick<Handlers['sessions'], 'attach' | 'detach'> {
  const { clients, runs } = room;
  return {
    async attach({ session_id, ...wish }, caller) {
      const attachment = await clients.attach(openRun(session_id, room), wish, caller);
      const { client_id, mode, attached_at } = attachment.attached;
      const base = publicUrl().replace(/^http/, 'ws').replace(/\/+$/, '');
      const stream_url = `${base}/api/v1/sessions/${session_id}/stream?ticket=${clients.ticketFor(attachment)}`;
      return { session_id, client_id, mode, attached_at: iso(attached_at), stream_url };
    },
    async detach({ session_id, client_id }, caller) {
      const all = [...(runs.get(session_id)?.clients.values() ?? [])];
      const client = client_id === undefined ? onlyOf(all, caller) : named(all, client_id);
      await client.dismiss('detached');
      return { detached: true };
    },
  };
}

/** The only client of the caller's key. Throws invalid_request. */
function onlyOf(clients: Client[], { key_id }: Caller): Client {
  const own = clients.filter(({ attached }) => attached.key_id === key_id);
  const [client] = own;
  if (client && own.length === 1) return client;
  throw new AppError('invalid_request', `${own.length} clients of this key are attached: name one`, {
    client_ids: own.map(({ attached }) => attached.client_id),
  });
}

function named(clients: Client[], client_id: string): Client {
  const client = clients.find(({ attached }) => attached.client_id === client_id);
  if (client) return client;
  throw new AppError('client_not_found', 'no such client is attached to this session', { client_id });
}

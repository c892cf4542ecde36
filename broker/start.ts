// Wires a broker together and takes it apart again; knows everything, decides nothing.

import { existsSync } from 'node:fs';
import { chmod, mkdir, rm } from 'node:fs/promises';
import type { Server } from 'node:http';
import type { AddressInfo, ListenOptions, Socket } from 'node:net';
import { isIP } from 'node:net';
import { join } from 'node:path';
import type { Handlers } from '../shared/api/index.ts';
import type { MachineId } from '../shared/api/route.ts';
import { openBudget } from '../shared/budget.ts';
import { sleep } from '../shared/clock.ts';
import { errnoOf, StartError } from '../shared/errors.ts';
import { lockDirectory } from '../shared/lock.ts';
import type { Logger } from '../shared/logger.ts';
import type { Lookups } from './admission/access.ts';
import { openIdempotency } from './admission/idempotency.ts';
import { openAudit } from './audit.ts';
import { openCommands } from './commands/index.ts';
import type { BrokerSettings } from './config.ts';
import { type Events, openEvents } from './events.ts';
import { fileHandlers } from './files/index.ts';
import { type History, openHistory } from './history.ts';
import { createHttpServer } from './http/app.ts';
import { openMetrics } from './http/metrics.ts';
import { serviceHandlers } from './http/service.ts';
import { openSpool } from './http/spool.ts';
import { openJoinTokens } from './join-tokens.ts';
import { mayRun, openKeys, rightsIn, whileAttachable } from './keys.ts';
import { openAuthority } from './link/authority.ts';
import { type ConnectSettings, defaultSettings } from './link/connect.ts';
import { type Door, openDoor } from './link/door.ts';
import { openPresence } from './link/presence.ts';
import { announce } from './machines/announce.ts';
import { machineHandlers } from './machines/index.ts';
import { openVitals } from './machines/vitals.ts';
import { openSchedules } from './schedules/index.ts';
import { openScheduleRecords } from './schedules/records.ts';
import { openSessions, type Sessions } from './sessions/index.ts';
import { openState, type State } from './state/index.ts';
import { openStreams } from './streams/index.ts';
import { openWebhooks, type WebhookSettings } from './webhooks/index.ts';

export interface Broker {
  /** Of the REST API; undefined with `local`. */
  url: string | undefined;
  /** HOST:PORT where agents dial in; undefined with `local`. */
  grpc: string | undefined;
  socket: string;
  /** The way in for clients of terminals, whatever carries them. */
  sessions: Pick<Sessions, 'redeem' | 'join'>;
  /** Stops taking work, tells agents to come back, flushes, gives the directory back. At most 10 s. */
  close(): Promise<void>;
}

/** For tests and benches: timing that cannot wait 45 s, names that resolve to what they say, events by the thousand. */
export interface Tuning {
  link?: Partial<ConnectSettings>;
  proofMs?: number;
  pings?: { pingMs: number; pongMs: number };
  resolve?: NonNullable<WebhookSettings['resolve']>;
  rooms?(rooms: { history: History; events: Events }): void;
  stalledMs?: number;
}

const proofMs = 5_000;
const maxUnproven = 512;
/** A frozen client is gone within 45 s. */
const pings = { pingMs: 15_000, pongMs: 30_000 };
/** A client of gRPC that neither takes nor sends bytes of a file, where it is its turn, is let go; as over HTTP. */
const stalledMs = 70_000;
/** Agents of a stopping broker come back spread over this. */
const returnSpreadMs = 5_000;
const finishRequestsMs = 4_000;
/** Bytes of large JSON bodies at once; each costs about five times as much while it is worked on. */
const maxContents = 64 * 1024 * 1024;
const maxBodies = 64 * 1024 * 1024;

/** Starts a broker. Throws StartError when the directory, the addresses or the settings do not allow it. */
export async function startBroker(
  settings: BrokerSettings,
  log: Logger,
  tuning: Tuning = {},
): Promise<Broker> {
  refuseOpenHttp(settings);
  const directory = settings.data_dir;
  await mkdir(directory, { recursive: true, mode: 0o700 });
  await chmod(directory, 0o700);
  const closers: (() => unknown)[] = [lockDirectory(directory, 'broker')];
  let closing: Promise<void> | undefined;
  const close = (): Promise<void> => {
    closing ??= closeAll(closers);
    return closing;
  };
  try {
    return await assemble(settings, log, tuning, closers, close);
  } catch (error) {
    await close();
    throw error;
  }
}

async function closeAll(closers: (() => unknown)[]): Promise<void> {
  for (const closer of closers.reverse()) await closer();
}

async function assemble(
  settings: BrokerSettings,
  log: Logger,
  tuning: Tuning,
  closers: (() => unknown)[],
  close: () => Promise<void>,
): Promise<Broker> {
  const directory = settings.data_dir;
  const state = await openState(directory);
  closers.push(() => state.close());
  const untouched = state.generation === 1;
  const authority = await openAuthority(directory, untouched);
  const history = historyOf(settings, state, untouched, log);
  closers.push(() => history.close());

  const events = openEvents(history, settings.keep_events);
  const keys = openKeys(state);
  const webhooks = openWebhooks(
    { state, history, events, rightsOf: rightsIn(state) },
    {
      directory,
      attempts: settings.webhook_attempts,
      waits: settings.webhook_retry,
      allow: settings.webhook_allow,
      keepMs: settings.keep_events,
      resolve: tuning.resolve,
    },
    log,
  );
  closers.push(() => webhooks.close());
  tuning.rooms?.({ history, events });
  const joinTokens = openJoinTokens(state, events, authority.fingerprint);
  const presence = openPresence();
  const vitals = openVitals(history);
  closers.push(() => vitals.close());
  const rooms = { state, history, events, presence, vitals };
  const idempotency = openIdempotency(history);
  const audit = openAudit(history, settings.keep_audit);
  closers.push(announce(rooms, log));
  const commandSettings = {
    directory: join(directory, 'output'),
    keepMs: settings.keep_history,
    keepBytes: settings.keep_output,
  };
  const runs = openScheduleRecords(rooms, settings.keep_history);
  const commandRooms = { ...rooms, mayRun: mayRun(state), ended: runs.ended };
  const commands = await openCommands(commandRooms, commandSettings, log);
  closers.push(() => commands.close());
  const status = { ready: false, url: '', grpc: '' };
  const publicUrl = (): string => settings.public_url ?? status.url;
  const sessionRooms = { ...rooms, audit: audit.record, whileAttachable: whileAttachable(state) };
  const sessions = openSessions(sessionRooms, { keepMs: settings.keep_history, publicUrl }, log);
  await state.drainTo((entries) => history.applyOutbox(entries));
  const schedules = openSchedules({ ...commandRooms, commands, records: runs }, log);
  // Nothing is linked to a broker that only its own box can call: what is due waits for the next start.
  if (settings.local) schedules.stop();

  const metrics = openMetrics(() => ({ online: presence.count, registered: state.machines.size }));
  const handlers: Handlers = {
    machines: machineHandlers(rooms),
    joinTokens: joinTokens.handlers,
    files: fileHandlers({ ...rooms, log, contents: openBudget(maxContents, 'files are read as content') }),
    commands: commands.handlers,
    batches: commands.batches.handlers,
    schedules: schedules.handlers,
    sessions: sessions.handlers,
    events: events.handlers,
    keys: keys.handlers,
    webhooks: webhooks.handlers,
    audit: audit.handlers,
    service: serviceHandlers({
      publicUrl,
      grpcAddress: () => status.grpc,
      fingerprint: authority.fingerprint,
      ca: authority.certificate,
      ready: () => status.ready,
      metrics,
    }),
  };
  const lookups: Lookups = {
    machine: (id) => state.machines.get(id) && {},
    command: (id) => behind(commands.machineOf(id)),
    batch: (id) => behind(...commands.batches.machinesOf(id)),
    schedule: (id) => behind(schedules.machineOf(id)),
    run: (id) => behind(schedules.machineOfRun(id)),
    session: (id) => behind(sessions.machineOf(id)),
    key: (id) => state.keys.get(id) && {},
    join_token: (id) => state.joinTokens.get(id) && {},
    webhook: (id) => state.webhooks.get(id) && {},
    delivery: (id) => (webhooks.hasDelivery(id) ? {} : undefined),
  };
  const streams = openStreams({
    handlers,
    state,
    keys,
    lookups,
    commands,
    sessions,
    idempotency,
    stalledMs: tuning.stalledMs ?? stalledMs,
    log,
  });
  const spool = await openSpool(join(directory, 'spool'));
  const bodies = openBudget(maxBodies, 'large bodies are under way');
  const terminals = { redeem: sessions.redeem, publicUrl };
  const app = { handlers, state, keys, lookups, idempotency, spool, bodies, metrics, log, ...terminals };

  const socket = join(directory, 'broker.sock');
  const servers = [tracked(createHttpServer(app, true))];
  let door: Door | undefined;
  closers.push(() => rm(socket, { force: true }));
  // Before anything listens: a start that fails gives back what it took.
  closers.push(async () => {
    status.ready = false;
    schedules.stop();
    streams.stop();
    events.stop();
    commands.stop();
    const leaving = sessions.stop();
    presence.drain(returnSpreadMs);
    await Promise.all([leaving, door?.close(), ...servers.map(stopServer)]);
  });
  await rm(socket, { force: true });
  await listen(servers[0]?.server, { path: socket }, socket);
  await chmod(socket, 0o600);

  if (!settings.local) {
    const link = { ...defaultSettings, ...tuning.link };
    const connectRooms = { ...rooms, switchboard: new Map(), fingerprint: authority.fingerprint, log };
    const doorOptions = {
      ...settings.grpc,
      ...pings,
      ...tuning.pings,
      proofMs: tuning.proofMs ?? proofMs,
      maxUnproven,
    };
    const opening = openDoor(authority, joinTokens, connectRooms, doorOptions, link, streams.serve);
    door = await opening.catch((error: unknown) => {
      throw cannotListen(error, '--grpc', address(settings.grpc.host, settings.grpc.port));
    });
    status.grpc = address(settings.grpc.host, door.port);
    const server = createHttpServer(app, false);
    servers.push(tracked(server));
    await listen(server, { ...settings.http }, '--http');
    // A server that listens on a host and port has such an address.
    const { port } = server.address() as AddressInfo;
    status.url = `http://${address(settings.http.host, port)}`;
    webhooks.start([port, door.port]);
  }
  status.ready = true;
  log.info({ http: status.url, grpc: status.grpc, data_dir: directory }, 'broker is up');
  return { url: status.url || undefined, grpc: status.grpc || undefined, socket, sessions, close };
}

function refuseOpenHttp({ http, insecure_http, local }: BrokerSettings): void {
  if (local || insecure_http || isLoopback(http.host)) return;
  throw new StartError(
    `--http ${address(http.host, http.port)} would send keys in the clear: listen on 127.0.0.1 behind a TLS proxy, or say --insecure-http`,
  );
}

function isLoopback(host: string): boolean {
  return host === 'localhost' || host === '::1' || (isIP(host) === 4 && host.startsWith('127.'));
}

function historyOf(settings: BrokerSettings, state: State, untouched: boolean, log: Logger): History {
  const file = join(settings.data_dir, 'history.db');
  if (!existsSync(file) && !untouched && !settings.new_history) {
    throw new StartError(
      `${file} is missing, though a broker has run here: put it back from a backup, or go on without past commands and events by starting once with --new-history`,
    );
  }
  if (settings.new_history && !existsSync(file))
    log.warn('starting with a new history: past commands and events are gone');
  try {
    return openHistory(file, state.installId, log);
  } catch (error) {
    if (error instanceof StartError) throw error;
    const text = error instanceof Error ? error.message : String(error);
    if (!/not a database|malformed/.test(text)) {
      throw new StartError(
        `${file} cannot be opened (${text}): mend that and start again, nothing is lost`,
        1,
      );
    }
    throw new StartError(
      `${file} is damaged (${text}): put it back from a backup, or move it away and start once with --new-history`,
    );
  }
}

function behind(...machines: (MachineId | undefined)[]): { machines: MachineId[] } | undefined {
  const known = machines.filter((machine) => machine !== undefined);
  return known.length === 0 ? undefined : { machines: known };
}

function address(host: string, port: number): string {
  return host.includes(':') ? `[${host}]:${port}` : `${host}:${port}`;
}

function listen(server: Server | undefined, options: ListenOptions, what: string): Promise<void> {
  return new Promise((resolve, reject) => {
    server?.once('error', (error) =>
      reject(cannotListen(error, what, options.path ?? address(options.host ?? '', options.port ?? 0))),
    );
    server?.listen(options, resolve);
  });
}

function cannotListen(error: unknown, what: string, where: string): StartError {
  const taken = errnoOf(error) === 'EADDRINUSE';
  const reason = taken
    ? 'is taken: another program, or another broker, listens there'
    : `cannot be had (${String(error)})`;
  return new StartError(`${what} ${where} ${reason}`, 1, { cause: error });
}

/** A server and its open connections. */
interface Listening {
  server: Server;
  sockets: Set<Socket>;
}

function tracked(server: Server): Listening {
  const sockets = new Set<Socket>();
  server.on('connection', (socket: Socket) => {
    sockets.add(socket);
    socket.once('close', () => sockets.delete(socket));
  });
  return { server, sockets };
}

/** Lets requests under way finish for a while, then cuts them. */
async function stopServer({ server, sockets }: Listening): Promise<void> {
  const closed = new Promise<void>((resolve) => server.close(() => resolve()));
  server.closeIdleConnections();
  // A connection that never said a word counts as busy for Node.
  for (const socket of sockets) if (socket.bytesRead === 0) socket.destroy();
  const patience = new AbortController();
  await Promise.race([closed, sleep(finishRequestsMs, patience.signal)]);
  patience.abort();
  // Those that became WebSockets are no longer the server's.
  for (const socket of sockets) socket.destroy();
  await closed;
}

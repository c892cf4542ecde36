// Starts a broker: creates its parts, connects them, opens the ports, and closes everything again.
import { chmod, rm } from 'node:fs/promises';
import type { AddressInfo } from 'node:net';
import { join } from 'node:path';
import { Server as TlsServer } from 'node:tls';
import { takeDirectory } from '../../shared/directory-lock.ts';
import { StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { isLoopback } from '../../shared/loopback.ts';
import { Quota } from '../../shared/quota.ts';
import { validKeyIn } from '../admission/authenticate.ts';
import type { BrokerSettings } from '../config.ts';
import { ConnectionLimiter, connectionLimits } from '../connection-limiter.ts';
import { StreamsService } from '../grpc-api/index.ts';
import type { AppOptions } from '../http/app.ts';
import { Spool } from '../http/body.ts';
import { createHttpServer } from '../http/server.ts';
import { defaultSettings } from '../link/control-stream.ts';
import { type AddService, type LinkListener, startListener } from '../link/listener.ts';
import type { Sessions } from '../sessions/index.ts';
import { certificateOf } from './certificate.ts';
import {
  type Closers,
  type Opening,
  openRooms,
  type Rooms,
  type Status,
  type Tuning,
} from './create-parts.ts';
import { address, cannotListen, listen, stopServer, tracked } from './http-servers.ts';

export type { Tuning } from './create-parts.ts';

export interface Broker {
  /** URL of the REST API; undefined with `local`. */
  url: string | undefined;
  /** HOST:PORT to which agents connect; undefined with `local`. */
  grpc: string | undefined;
  socket: string;
  /** Attaches terminal clients of any transport to sessions. */
  sessions: Pick<Sessions, 'redeem' | 'join'>;
  /** Whether the broker serves requests and its history database answers. */
  alive(): boolean;
  /**
   * Stops accepting work, asks agents to reconnect,
   * flushes data and releases the directory. Takes at most 10 s.
   */
  close(): Promise<void>;
}

type Stops = (() => Promise<unknown>)[];

const proofMs = 5_000;
/** Pings for gRPC connections: a client that is frozen is disconnected within 45 s. */
const pings = { pingMs: 15_000, pongMs: 30_000 };
/**
 * Longest time that a gRPC client may stall a file transfer when the client must act.
 * Then the call is cut, as over HTTP.
 */
const stalledMs = 70_000;
/** Agents of a stopping broker reconnect at random times within this. */
const returnSpreadMs = 5_000;
/** Longest wait for the headers of a first request. */
const silentMs = 15_000;
const certificateMs = 10_000;
/** Most bytes of large JSON bodies that may be arriving at once. */
const maxBodies = 64 * 1024 * 1024;

/**
 * Starts a broker. Throws StartError if the directory, the addresses or the settings do not allow a start.
 */
export async function startBroker(
  settings: BrokerSettings,
  log: Logger,
  tuning: Tuning = {},
): Promise<Broker> {
  refuseOpenHttp(settings);
  const directory = settings.data_dir;
  const closers: (() => unknown)[] = [takeDirectory(directory, 'broker')];
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
  closers: Closers,
  close: () => Promise<void>,
): Promise<Broker> {
  const status: Status = { ready: false, url: '', grpc: '', publicGrpc: '', pin: '' };
  const rooms = await openRooms({ settings, tuning, status, closers, log });
  const { events, presence, commands, schedules, sessions } = rooms;
  const streams = new StreamsService({ ...rooms, stalledMs: tuning.stalledMs ?? stalledMs, log });
  const spool = await Spool.open(join(settings.data_dir, 'spool'));
  const bodies = new Quota(maxBodies, 'large bodies are under way');
  const terminals = {
    redeem: (ticket: string) => sessions.redeem(ticket),
    publicUrl: () => settings.public_url ?? status.url,
  };
  const app = { ...rooms, spool, bodies, log, ...terminals };
  const socket = join(settings.data_dir, 'broker.sock');
  const local = tracked(createHttpServer(app, { silentMs: tuning.silentMs ?? silentMs, hsts: false }));
  /** Functions that stop the listening servers. */
  const stops: Stops = [() => stopServer(local)];
  closers.push(() => rm(socket, { force: true }));
  // Registered before anything listens, so that a failed start releases everything too.
  closers.push(async () => {
    status.ready = false;
    for (const room of [schedules, streams, events, commands]) room.stop();
    const leaving = sessions.stop();
    presence.drain(returnSpreadMs);
    await Promise.all([leaving, ...stops.map((stop) => stop())]);
  });
  await rm(socket, { force: true });
  await listen(local.server, { path: socket }, socket);
  await chmod(socket, 0o600);
  const addServices: AddService = (...server) => streams.addTo(...server);
  if (!settings.local) await openNetwork({ settings, tuning, status, closers, log, app, stops, addServices });
  status.ready = true;
  log.info({ http: status.url, grpc: status.grpc, data_dir: settings.data_dir }, 'broker is up');
  const alive = (): boolean => status.ready && answers(rooms.history);
  return { url: status.url || undefined, grpc: status.grpc || undefined, socket, sessions, alive, close };
}

interface Network extends Opening {
  app: AppOptions & Rooms;
  stops: Stops;
  addServices: AddService;
}

/** Opens the ports for agents and for REST clients. */
async function openNetwork(network: Network): Promise<void> {
  const { settings, tuning, status, closers, log, app, stops, addServices } = network;
  const agents = await listenForAgents(settings, tuning, app, addServices, log);
  stops.push(() => agents.close());
  const { public_grpc, http } = settings;
  status.grpc = address(settings.grpc.host, agents.port);
  status.publicGrpc = public_grpc ? address(public_grpc.host, public_grpc.port) : '';
  const everyMs = tuning.certificateMs ?? certificateMs;
  const certificate = await certificateOf(settings, app.authority, everyMs, log);
  const limits = tuning.connections ?? connectionLimits().http;
  const server = createHttpServer(app, {
    connections: new ConnectionLimiter({ ...limits, isShared: sharedBy(app) }),
    silentMs: tuning.silentMs ?? silentMs,
    tls: certificate?.context,
    hsts: certificate?.isPublic ?? false,
  });
  if (certificate && server instanceof TlsServer)
    closers.push(certificate.follow((one) => server.setSecureContext(one)));
  const counted = tracked(server);
  stops.push(() => stopServer(counted));
  await listen(server, { ...http }, '--http');
  // A server that listens on a host and port has an address of this type.
  const { port } = server.address() as AddressInfo;
  status.url = `${certificate ? 'https' : 'http'}://${address(http.host, port)}`;
  status.pin = certificate?.pin ?? '';
  app.webhooks.start([port, agents.port]);
}

function answers(history: Rooms['history']): boolean {
  try {
    return history.sql('SELECT 1').get() !== undefined;
  } catch {
    return false;
  }
}

function listenForAgents(
  { grpc }: BrokerSettings,
  tuning: Tuning,
  rooms: Rooms,
  serve: AddService,
  log: Logger,
): Promise<LinkListener> {
  const { authority, keys } = rooms;
  const link = { ...defaultSettings, ...tuning.link };
  const connections = new ConnectionLimiter({
    ...connectionLimits().grpc,
    deadlineMs: tuning.proofMs ?? proofMs,
    isShared: sharedBy(rooms),
  });
  const services = { ...rooms, connections, fingerprint: authority.fingerprint, log };
  const options = {
    ...grpc,
    ...pings,
    ...tuning.pings,
    handshakeMs: tuning.proofMs ?? proofMs,
    hasKey: (authorization: string): boolean => validKeyIn(authorization, keys) !== undefined,
  };
  const opening = startListener(services, options, link, serve);
  return opening.catch((error: unknown) => {
    throw cannotListen(error, '--grpc', address(grpc.host, grpc.port));
  });
}

/** Whether many clients may share an address: that of this machine, or of a trusted proxy. */
function sharedBy({ proxies }: Rooms): (from: string) => boolean {
  return (from) => isLoopback(from) || proxies.isTrusted(from);
}

function refuseOpenHttp({ http, insecure_http, local, tls, tls_cert }: BrokerSettings): void {
  const secured = tls || tls_cert !== undefined;
  if (secured && insecure_http)
    throw new StartError(
      '--insecure-http is REST without TLS: not together with --tls or --tls-cert, choose one',
    );
  if (local || insecure_http || secured || isLoopback(http.host)) return;
  throw new StartError(
    `--http ${address(http.host, http.port)} would send keys in the clear: say --tls or --tls-cert and --tls-key, listen on 127.0.0.1 behind a TLS proxy, or say --insecure-http`,
  );
}

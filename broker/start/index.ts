// Starts a broker: creates its parts, connects them and opens its ports. Closes everything in reverse order.

import { once } from 'node:events';
import { chmod, rm } from 'node:fs/promises';
import type { Server } from 'node:http';
import type { AddressInfo, ListenOptions, Socket } from 'node:net';
import { join } from 'node:path';
import { Server as TlsServer } from 'node:tls';
import { endsWithin } from '../../shared/clock.ts';
import { takeDirectory } from '../../shared/directory-lock.ts';
import { StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { isLoopback } from '../../shared/loopback.ts';
import { Quota } from '../../shared/quota.ts';
import { reasonOf } from '../../shared/system-error-messages.ts';
import { ConnectionLimiter, connectionLimits } from '../connection-limiter.ts';
import { StreamsService } from '../grpc-api/index.ts';
import type { AppOptions } from '../http/application.ts';
import { createSpool } from '../http/body.ts';
import { consoleDirectory } from '../http/console-files.ts';
import type { Status } from '../http/info-health-metrics-and-docs.ts';
import { createHttpServer } from '../http/server.ts';
import { defaultSettings } from '../link/link-times-and-limits.ts';
import { backlog, startListener } from '../link/listener.ts';
import type { Sessions } from '../sessions/session-handlers.ts';
import type { BrokerSettings } from '../settings-schema.ts';
import { createPeering, type Peering } from './connect-other-brokers.ts';
import { type Closers, createParts, type Opening, type Parts, type Tuning } from './create-parts.ts';
import { reportAlive } from './heartbeat-url.ts';
import { certificateOf } from './rest-api-certificate.ts';

export type { Tuning } from './create-parts.ts';

export interface Broker {
  /**
   * URL of the REST API; undefined if the setting `local` is on, because the broker then serves only its socket file.
   */
  url: string | undefined;
  /** HOST:PORT to which agents connect; undefined if the setting `local` is on. */
  grpc: string | undefined;
  socket: string;
  /** Attaches terminal clients of any transport to sessions. */
  sessions: Pick<Sessions, 'redeem' | 'join'>;
  /**
   * True if the broker serves requests and its history.db answers. With a database server instead of history.db, the
   * server need not answer, because a restart of the broker would not make the server work again.
   */
  alive(): Promise<boolean>;
  /** Never resolves. Rejects if the broker must end, because its database has lost changes. */
  failed: Promise<never>;
  /**
   * Stops accepting work, asks agents to reconnect, writes all data and releases the data directory. Takes at most 10
   * s.
   */
  close(): Promise<void>;
}

const proofMs = 5_000;
/**
 * Minimum age, in milliseconds, at which an agent's unauthenticated connection may be closed for a newer one. If the
 * limit of all connections is reached, younger connections may be closed too.
 */
const graceMs = 2_000;
/** Pings on gRPC connections. A client that does not answer is disconnected within 45 s. */
const pings = { pingMs: 15_000, pongMs: 30_000 };
/**
 * If a gRPC client neither reads nor sends for this number of milliseconds during a file transfer, the broker ends the
 * call. HTTP has the same limit.
 */
const stalledMs = 70_000;
/** When the broker asks agents to reconnect, each waits a random time of at most this number of milliseconds. */
const returnSpreadMs = 5_000;
/** Milliseconds within which the headers of the first request on a connection must arrive. */
const silentMs = 15_000;
const certificateMs = 10_000;
/** Maximum total size, in bytes, of the large JSON bodies of all requests in progress. */
const maxBodies = 64 * 1024 * 1024;
/** Milliseconds that a stopping server waits for requests in progress to finish. */
const finishRequestsMs = 4_000;

/**
 * Starts a broker. Throws StartError if the directory, the addresses or the settings do not allow a start.
 */
export async function startBroker(
  settings: BrokerSettings,
  log: Logger,
  tuning: Tuning = {},
): Promise<Broker> {
  refuseExposedHttp(settings);
  const closers: Closers = [takeDirectory(settings.data_dir, 'broker')];
  let closing: Promise<void> | undefined;
  const close = (): Promise<void> => {
    closing ??= closeAll(closers);
    return closing;
  };
  try {
    return await startParts(settings, log, tuning, closers, close);
  } catch (error) {
    await close();
    throw error;
  }
}

async function closeAll(closers: Closers): Promise<void> {
  for (const closer of closers.reverse()) await closer();
}

async function startParts(
  settings: BrokerSettings,
  log: Logger,
  tuning: Tuning,
  closers: Closers,
  close: () => Promise<void>,
): Promise<Broker> {
  const status: Status = { ready: false, url: '', grpc: '', publicGrpc: '', pin: '' };
  const publicUrl = (): string => settings.public_url ?? status.url;
  const opening = { settings, tuning, status, publicUrl, closers, log };
  const parts = await createParts(opening);
  const { alerts, events, live, presence, commands, schedules, sessions, upgrades } = parts;
  const { owners, peerClients: clients } = parts;
  const peering =
    owners && clients && !settings.local
      ? await createPeering(opening, { ...parts, owners, clients, spreadMs: returnSpreadMs })
      : undefined;
  const peers = peering?.peers;
  const streams = new StreamsService({ ...parts, peers, stalledMs: tuning.stalledMs ?? stalledMs, log });
  const spool = await createSpool(join(settings.data_dir, 'spool'));
  const bodies = new Quota(maxBodies, 'too many large request bodies are arriving; try again later');
  const redeem = (ticket: string) => sessions.redeem(ticket);
  const pages = { consoleDirectory: tuning.console ?? consoleDirectory };
  const app = { ...parts, peers, spool, bodies, log, redeem, publicUrl, ...pages };
  const socket = join(settings.data_dir, 'broker.sock');
  const local = createHttpServer(app, { silentMs: tuning.silentMs ?? silentMs, hsts: false });
  const stops = [stopperOf(local)];
  closers.push(() => rm(socket, { force: true }));
  // This function stops the servers. It is registered before a server listens, so that a start that fails later stops
  // the servers too.
  closers.push(async () => {
    status.ready = false;
    // This broker gives up its lease first, so that other brokers take over its machines while its parts stop.
    await parts.cluster?.leave();
    for (const part of [alerts, upgrades, schedules, streams, events, live, commands]) part.stop();
    const leaving = sessions.stop();
    presence.drain(returnSpreadMs);
    await Promise.all([leaving, ...stops.map((stop) => stop())]);
    parts.history.connection.stopWaiting();
  });
  await rm(socket, { force: true });
  await listen(local, { path: socket }, socket, socket);
  await chmod(socket, 0o600);
  if (!settings.local) await startServers(opening, app, streams, stops);
  if (peering) await startPeerPort(opening, app, streams, peering, stops);
  status.ready = true;
  log.info({ http: status.url, grpc: status.grpc, data_dir: settings.data_dir }, 'broker is up');
  const works = async (): Promise<boolean> => status.ready && (await answers(parts.history));
  const { heartbeat_url, heartbeat_every, local: isLocal } = settings;
  if (heartbeat_url !== undefined && !isLocal)
    closers.push(reportAlive(heartbeat_url, heartbeat_every, { ...parts.deliveries, alive: works, log }));
  // The broker counts as alive even if its database server does not answer. A restart by systemd's watchdog would not
  // bring the server back, but would end all links and terminals.
  const alive = async (): Promise<boolean> => (parts.history.isRemote ? status.ready : await works());
  const addresses = { url: status.url || undefined, grpc: status.grpc || undefined };
  return { ...addresses, socket, sessions, alive, failed: failureOf(parts.history), close };
}

/** Returns a promise that rejects if the database has lost changes of this broker. It never resolves. */
function failureOf(history: Parts['history']): Promise<never> {
  const failed = Promise.withResolvers<never>();
  // Without a handler, the rejection would count as unhandled where nothing awaits it, as in tests.
  failed.promise.catch(() => {});
  history.connection.onCommitsLost(failed.reject);
  return failed.promise;
}

/** Opens the ports for agents and for REST clients. */
async function startServers(
  opening: Opening,
  app: AppOptions & Parts,
  streams: StreamsService,
  stops: (() => Promise<unknown>)[],
): Promise<void> {
  const { settings, tuning, status, closers, log } = opening;
  const agents = await listenForAgents(opening, app, streams);
  stops.push(() => agents.close());
  const { public_grpc, http } = settings;
  status.grpc = address(settings.grpc.host, agents.port);
  status.publicGrpc = public_grpc ? address(public_grpc.host, public_grpc.port) : '';
  const everyMs = tuning.certificateMs ?? certificateMs;
  const certificate = await certificateOf(settings, app.authority, everyMs, log);
  const limits = tuning.connections ?? connectionLimits().http;
  const server = createHttpServer(app, {
    connections: new ConnectionLimiter({ ...limits, isShared: app.proxies.isShared }),
    silentMs: tuning.silentMs ?? silentMs,
    tls: certificate?.context,
    hsts: certificate?.isPublic ?? false,
  });
  if (certificate && server instanceof TlsServer)
    closers.push(certificate.follow((one) => server.setSecureContext(one)));
  stops.push(stopperOf(server));
  await listen(server, http, '--http', address(http.host, http.port));
  // The cast is safe: a server that listens on a host and port has an address of this type.
  const { port } = server.address() as AddressInfo;
  status.url = `${certificate ? 'https' : 'http'}://${address(http.host, port)}`;
  status.pin = certificate?.pin ?? '';
  // Webhooks and alert channels must not call the ports of this broker.
  app.deliveries.guard.protect(port, agents.port);
  await app.webhooks.start();
  await app.alerts.start();
  await app.upgrades.start();
}

/** Opens the port to which other brokers forward requests. */
async function startPeerPort(
  { settings, tuning }: Opening,
  app: AppOptions & Parts,
  streams: StreamsService,
  peering: Peering,
  stops: (() => Promise<unknown>)[],
): Promise<void> {
  const where = tuning.cluster?.listen ?? settings.peer_listen ?? { host: '127.0.0.1', port: 0 };
  const { host } = where;
  const opened = await peering
    .listen(app, streams, where, tuning.silentMs ?? silentMs)
    .catch((error: unknown) => {
      throw cannotListen(error, '--peer-listen', address(host, where.port));
    });
  app.deliveries.guard.protect(opened.port);
  stops.push(() => opened.close(finishRequestsMs));
  await app.owners?.advertise(settings.peer_url ?? `https://${address(host, opened.port)}`);
}

function address(host: string, port: number): string {
  return host.includes(':') ? `[${host}]:${port}` : `${host}:${port}`;
}

/** Makes a server listen. Throws a StartError whose message names the setting `what` and the address `where`. */
async function listen(server: Server, options: ListenOptions, what: string, where: string): Promise<void> {
  const listening = once(server, 'listening');
  server.listen({ backlog, ...options });
  await listening.catch((error: unknown) => {
    throw cannotListen(error, what, where);
  });
}

function cannotListen(error: unknown, what: string, where: string): StartError {
  return new StartError(`${what} ${reasonOf(error, where)}`, 1, { cause: error });
}

/** Returns a function that stops a server, and closes the connections whose requests do not finish in time. */
function stopperOf(server: Server): () => Promise<void> {
  const sockets = new Set<Socket>();
  server.on('connection', (socket: Socket) => {
    sockets.add(socket);
    socket.once('close', () => sockets.delete(socket));
  });
  return async () => {
    const closed = new Promise<void>((resolve) => server.close(() => resolve()));
    server.closeIdleConnections();
    // closeIdleConnections() leaves a connection open that never sent a byte, because Node counts it as busy. Such
    // connections are closed here.
    for (const socket of sockets) if (socket.bytesRead === 0) socket.destroy();
    await endsWithin(finishRequestsMs, closed);
    // Connections that became WebSockets no longer belong to the server, so they are closed here.
    for (const socket of sockets) socket.destroy();
    await closed;
  };
}

function answers(history: Parts['history']): Promise<boolean> {
  return history.get('SELECT 1').then(
    () => true,
    () => false,
  );
}

function listenForAgents({ settings, tuning, log }: Opening, parts: Parts, streams: StreamsService) {
  const { grpc } = settings;
  const { authority, keys } = parts;
  const link = { ...defaultSettings, ...tuning.link };
  const connections = new ConnectionLimiter({
    ...connectionLimits().grpc,
    deadlineMs: tuning.proofMs ?? proofMs,
    graceMs,
    isShared: parts.proxies.isShared,
  });
  const { fingerprint } = authority;
  const services = { ...parts, connections, fingerprint, agentBrokers: settings.agent_brokers, log };
  const options = {
    ...grpc,
    pings: tuning.pings ?? pings,
    hasKey: (authorization: string): boolean => keys.accepts(authorization),
  };
  const opening = startListener(services, options, link, (server, markAuthenticated) =>
    streams.addTo(server, { markAuthenticated }),
  );
  return opening.catch((error: unknown) => {
    throw cannotListen(error, '--grpc', address(grpc.host, grpc.port));
  });
}

function refuseExposedHttp({ http, insecure_http, local, tls, tls_cert }: BrokerSettings): void {
  const secured = tls || tls_cert !== undefined;
  if (secured && insecure_http)
    throw new StartError(
      '--insecure-http serves REST without TLS, so it cannot be used with --tls or --tls-cert: choose one',
    );
  if (local || insecure_http || secured || isLoopback(http.host)) return;
  throw new StartError(
    `--http ${address(http.host, http.port)} would send API keys unencrypted. Use --tls, or --tls-cert and --tls-key; or listen on 127.0.0.1 behind a TLS proxy; or allow it with --insecure-http`,
  );
}

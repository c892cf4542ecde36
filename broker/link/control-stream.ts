// Serves the control stream of one agent: challenge, hello and welcome, then heartbeats and small calls.
import { randomBytes } from 'node:crypto';
import { status as grpcStatus, type ServerDuplexStream } from '@grpc/grpc-js';
import type { ConnectRequest__Output } from '../../proto/types/farhand/link/v1/ConnectRequest.ts';
import type { ConnectResponse } from '../../proto/types/farhand/link/v1/ConnectResponse.ts';
import type { Hello__Output } from '../../proto/types/farhand/link/v1/Hello.ts';
import { methods, protocolVersion } from '../../shared/agent-rpcs.ts';
import { after, monotonic, mostSkewMs, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { verifyProof } from '../../shared/identity-proof.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Cluster } from '../cluster/index.ts';
import type { ConnectionLimiter } from '../connection-limiter.ts';
import type { TurnLimit } from '../event-loop-turn-limit.ts';
import type { Link, Presence } from '../presence/index.ts';
import { installationOf, lastUpgradeOf } from '../presence/installation-report.ts';
import type { MachineFacts } from '../presence/stored-facts-and-metrics.ts';
import type { Machine, State } from '../state/index.ts';
import { type AnswerWaiters, Calls } from './agent-calls.ts';
import type { Heartbeats } from './heartbeats.ts';
import type { LinkLimits } from './link-rate-limits.ts';
import type { LinkSettings } from './link-times-and-limits.ts';

export type ConnectStream = ServerDuplexStream<ConnectRequest__Output, ConnectResponse>;

/** The parts of the broker that links use. */
export interface LinkServices {
  state: State;
  presence: Presence;
  machineFacts: MachineFacts;
  connections: ConnectionLimiter;
  answerWaiters: AnswerWaiters;
  /** SHA-256 of the broker's CA certificate. The agent signs it together with the nonce of the challenge. */
  fingerprint: string;
  /** The other brokers on the same database; undefined with a single broker. */
  cluster?: Pick<Cluster, 'isAlive' | 'take' | 'takeNew' | 'owns' | 'unlinked'> | undefined;
  /**
   * Broker addresses that each agent gets with the welcome, stores, and uses from then on. If the list is empty, an
   * agent continues to use the broker addresses that it has.
   */
  agentBrokers: readonly string[];
  limits: LinkLimits;
  heartbeats: Heartbeats;
  /** Limits how many hellos are checked in one turn of the event loop. */
  hellos: TurnLimit;
  log: Logger;
}

/** Largest message in bytes, in either direction. */
export const messageBytes = 1024 * 1024 + 64 * 1024;
const frameBytes = 256 * 1024;
/**
 * Longest wait for the hello of a control stream, in milliseconds. The limit holds for each control stream, even if
 * another one has already authenticated the same connection.
 */
const helloMs = 5_000;
/**
 * Maximum number of bytes that may wait for an agent on its control stream. If the agent reads too slowly, it is
 * disconnected.
 */
const maxUnreadBytes = 4 * 1024 * 1024;
/** Approximate size of a message without its request, in bytes. */
const headBytes = 256;
/** Form of ids that an agent chooses. They are checked because the broker writes them into its records. */
const plainId = /^[\x20-\x7e]{0,200}$/;
/** Form of machine ids, as newId makes them. */
const machineId = /^mach_[0-9A-Za-z]{22}$/;
/**
 * Maximum number of capabilities read from a hello. It is one more than a machine may report, so that a longer
 * list is found and refused.
 */
const mostCapabilities = 64 + 1;
/**
 * Maximum number of process ids read from a hello. The agent lists further ids in a later hello, after these are
 * acknowledged.
 */
const mostProcesses = 4096;
/**
 * Maximum number of messages, other than answers to calls, that an agent may send in one burst. Each heartbeat interval
 * allows `unaskedPerBeat` more.
 */
const mostUnasked = 2_000;
const unaskedPerBeat = 500;
const withoutDatabase =
  'this broker cannot reach its database now: connect to another broker, or try again later';
/** A heartbeat with a report counts as this many messages, because a report is checked and stored. */
const reportCost = 25;

/** Serves one control stream. Resolves when its link has begun or was refused. Never rejects. */
export async function serveConnect(
  stream: ConnectStream,
  address: string,
  services: LinkServices,
  settings: LinkSettings,
): Promise<void> {
  const { limits, connections, hellos, cluster, state } = services;
  if (cluster?.isAlive === false) return refuse(stream, grpcStatus.UNAVAILABLE, withoutDatabase);
  let machine: Machine | undefined;
  try {
    const nonce = randomBytes(32);
    stream.write({ challenge: { nonce } });
    const hello = await helloOf(stream);
    await hellos.enter();
    // The machine may just have been registered at another broker.
    if (cluster && hello && !state.machines.has(hello.machine_id)) await state.refresh();
    machine = hello && authenticate(stream, hello, nonce, address, services);
    if (!hello || !machine) return;
    connections.authenticate(stream.getPeer());
    if (limits.admits(machine.id)) {
      await new AgentLink(stream, machine.id, hello, services, settings).begin(hello, address);
    } else {
      connections.closeSoon(stream.getPeer());
      refuse(stream, grpcStatus.RESOURCE_EXHAUSTED, 'this machine connected too often: wait a minute');
    }
  } catch (error) {
    const about = { address, err: error };
    if (machine) limits.machine('warn', machine.id, about, 'the connection of an agent failed');
    else limits.unauthenticated(address, about, 'a connection failed before its agent authenticated');
    if (machine) connections.closeSoon(stream.getPeer());
    refuse(stream, grpcStatus.INTERNAL, textOf(error));
  }
}

/**
 * Reads the first message and then pauses the stream. Returns undefined if the stream was refused. Rejects if
 * the stream fails.
 */
async function helloOf(stream: ConnectStream): Promise<Hello__Output | undefined> {
  const { promise, resolve, reject } = Promise.withResolvers<ConnectRequest__Output | undefined>();
  const take = (message: ConnectRequest__Output): void => {
    stream.pause();
    resolve(message);
  };
  const end = (): void => resolve(undefined);
  const cancelDeadline = after(helloMs, () =>
    refuse(stream, grpcStatus.DEADLINE_EXCEEDED, 'no first message (hello) arrived in time; connect again'),
  );
  stream.once('data', take).once('end', end).once('close', end).once('error', reject);
  const first = await promise.finally(() => {
    cancelDeadline();
    stream.off('data', take).off('end', end).off('close', end).off('error', reject);
  });
  return first?.hello ?? refuse(stream, grpcStatus.INVALID_ARGUMENT, 'the first message must be a hello');
}

/** Finds the machine whose key signed this hello. Returns undefined if the stream was refused. */
function authenticate(
  stream: ConnectStream,
  hello: Hello__Output,
  nonce: Buffer,
  address: string,
  { state, fingerprint, limits }: LinkServices,
): Machine | undefined {
  const { machine_id } = hello;
  const possible = machineId.test(machine_id);
  const machine = state.machines.get(machine_id);
  if (possible && !machine) {
    limits.unauthenticated(address, { machine_id }, 'refused an agent: its machine is not registered');
    const reason =
      'the broker has no machine with this id: it was removed, or a backup from before it joined was restored';
    stream.write({ removed: { reason } });
    return void stream.end();
  }
  const ids = [hello.instance_id, hello.journal_id];
  const proof = { nonce, machine_id, fingerprint };
  if (machine && !verifyProof(proof, hello.signature, Buffer.from(machine.public_key, 'base64'))) {
    const text = 'the agent did not prove that it has the machine’s private key';
    limits.unauthenticated(address, { machine_id }, `refused an agent: ${text}`);
    return refuse(stream, grpcStatus.UNAUTHENTICATED, text);
  }
  if (hello.protocol > protocolVersion) {
    const text = 'this agent’s protocol is newer than the broker’s: update the broker';
    return refuse(stream, grpcStatus.FAILED_PRECONDITION, text);
  }
  if (possible && ids.every((id) => plainId.test(id))) return machine;
  return refuse(stream, grpcStatus.INVALID_ARGUMENT, 'machine_id, instance_id or journal_id is not valid');
}

function refuse(stream: ConnectStream, code: grpcStatus, details: string): undefined {
  stream.emit('error', { code, details });
}

export function textOf(error: unknown): string {
  return error instanceof AppError ? error.message : 'unexpected failure; see the broker’s log';
}

/**
 * The link to one authenticated agent. With 10,000 links every KiB counts, so a link has no reference to a message that
 * it has handled.
 */
class AgentLink {
  readonly #link: Link;
  readonly #stream: ConnectStream;
  readonly #services: LinkServices;
  readonly #settings: LinkSettings;
  readonly #calls: Calls;
  /** Time at which the last message arrived, in milliseconds of `monotonic`. `Heartbeats` reads it. */
  heardAt = monotonic();
  /** Undefined if no message waits to be written; see Beating in heartbeats.ts. */
  unwrittenSince: number | undefined;
  #ended = false;
  /** Bytes of messages that the agent has not read yet. */
  #unreadBytes = 0;
  /** Number of messages that the agent sent without being asked. Each heartbeat lowers it (see `mostUnasked`). */
  #unasked = 0;
  #clockIsOff = false;

  constructor(
    stream: ConnectStream,
    machineId: string,
    hello: Hello__Output,
    services: LinkServices,
    settings: LinkSettings,
  ) {
    this.#stream = stream;
    this.#services = services;
    this.#settings = settings;
    const offered = hello.methods.flatMap((name) => methods.get(name)?.name ?? []);
    this.#calls = new Calls({
      machineId,
      methods: offered,
      openCalls: Math.min(settings.openCalls, hello.limits?.open_calls || settings.openCalls),
      idleMs: settings.callIdleMs,
      send: (message) => this.#send(message),
      answerWaiters: services.answerWaiters,
    });
    const id = newId('link');
    this.#link = {
      id,
      machineId,
      instanceId: hello.instance_id,
      methods: offered,
      stub: this.#calls.stub,
      // Without a journal of its processes, an agent loses their results when it ends. Each start of the agent then
      // counts as a new journal. Its id is the instance id, which also changes at each start.
      journalId: hello.journal_id || hello.instance_id || id,
      processIds: hello.process_ids.slice(0, mostProcesses),
      close: (last) => this.#close(last),
    };
  }

  #close(last: ConnectResponse): void {
    this.#send(last);
    this.#end();
  }

  /** Stores the facts of the hello, sends the welcome, and serves the link from then on. */
  async begin(hello: Hello__Output, address: string): Promise<void> {
    const { presence, machineFacts, state, heartbeats, cluster, log } = this.#services;
    const { host, agent_version, metrics } = hello;
    const { hostname = '', os = '', arch = '' } = host ?? {};
    const capabilities = hello.capabilities.slice(0, mostCapabilities);
    const installation = installationOf(hello.installation);
    const facts = { hostname, os, arch, agent_version, capabilities, ip: address, installation };
    const { machineId, id } = this.#link;
    await cluster?.take(machineId, id);
    await machineFacts.hello(machineId, facts, metrics).catch((error: unknown) => {
      cluster?.unlinked(machineId, id);
      throw error;
    });
    // While the facts were being written, the stream may have ended, and must not replace a newer link. Or another broker
    // has become the owner of the machine, or it was removed.
    if (this.#stream.destroyed || this.#stream.readableEnded) return this.#end();
    if (cluster && !cluster.owns(machineId)) return this.#close({ drain: { retry_after_ms: 0 } });
    if (!state.machines.has(machineId))
      return this.#close({ removed: { reason: 'this machine was removed' } });
    this.#welcome();
    if (metrics) this.#watchClock();
    const older = presence.add(this.#link);
    if (older) this.#recordTakeover(older);
    this.#log('info', 'machine linked', { address, agent_version });
    heartbeats.add(this);
    const fail = (error: unknown): void => {
      log.debug({ err: error, machine_id: machineId }, 'the control stream of a machine failed');
      this.#end();
    };
    const take = (message: ConnectRequest__Output): void => {
      try {
        this.#take(message);
      } catch (error) {
        fail(error);
      }
    };
    for (const event of ['end', 'cancelled', 'close']) this.#stream.on(event, () => this.#end());
    this.#stream.on('data', take).on('error', fail).resume();
  }

  beat(): void {
    if (this.#unasked > 0) this.#unasked = Math.max(0, this.#unasked - unaskedPerBeat);
    this.#send({ heartbeat: {} });
  }

  probe(): void {
    this.unwrittenSince = monotonic();
    this.#services.connections.probe(this.#stream.getPeer());
  }

  silent(): void {
    this.#cut('disconnected the machine, because it was silent for too long');
  }

  #welcome(): void {
    const { heartbeatMs, silenceMs, openCalls } = this.#settings;
    this.#send({
      welcome: {
        link_id: this.#link.id,
        limits: { frame_bytes: frameBytes, open_calls: openCalls, message_bytes: messageBytes },
        time_ms: now(),
        heartbeat_ms: heartbeatMs,
        silence_ms: silenceMs,
        brokers: [...this.#services.agentBrokers],
      },
    });
  }

  #take({ reply, heartbeat, farewell }: ConnectRequest__Output): void {
    if (this.#ended) return;
    this.heardAt = monotonic();
    this.#unasked += heartbeat?.metrics ? reportCost : 1;
    if (this.#unasked > mostUnasked) this.#cut('disconnected the machine, because it sent too many messages');
    if (this.#ended) return;
    if (reply) this.#calls.reply(reply);
    if (heartbeat) {
      this.#services.machineFacts.heard(this.#link.machineId, heartbeat.metrics);
      this.#watchClock();
      const upgrade = lastUpgradeOf(heartbeat.last_upgrade);
      if (upgrade) this.#services.machineFacts.upgraded(this.#link.machineId, upgrade);
    }
    if (farewell) this.#end();
  }

  /**
   * Warns if the machine's clock is far off, because times and certificates depend on it. The warning is
   * repeated only if the clock was right in between.
   */
  #watchClock(): void {
    const facts = this.#services.machineFacts.of(this.#link.machineId);
    const clock_offset_ms = facts?.report?.clock_offset_ms ?? 0;
    const isOff = Math.abs(clock_offset_ms) > mostSkewMs;
    if (isOff && !this.#clockIsOff) {
      const text = `the machine’s clock is ${clock_offset_ms < 0 ? 'behind' : 'ahead of'} the broker’s: set both by a time server`;
      const machine = this.#services.state.machines.get(this.#link.machineId)?.name;
      this.#log('warn', text, { machine, clock_offset_ms });
    }
    this.#clockIsOff = isOff;
  }

  #send(message: ConnectResponse): void {
    if (this.#ended) return;
    // Each call lowers the count of unasked messages, because its answer will raise the count again. The count cannot
    // fall below -mostUnasked. An agent that answers no calls could otherwise send any number of messages later.
    if (message.call) this.#unasked = Math.max(-mostUnasked, this.#unasked - 1);
    // The bytes are counted here, because Node's limit on this stream counts messages.
    const bytes = (message.call?.request?.length ?? 0) + headBytes;
    this.#unreadBytes += bytes;
    this.unwrittenSince ??= monotonic();
    this.#stream.write(message, () => {
      this.#unreadBytes -= bytes;
      this.unwrittenSince = this.#unreadBytes === 0 ? undefined : monotonic();
    });
    if (this.#unreadBytes > maxUnreadBytes)
      this.#cut('disconnected the machine, because its agent reads the control stream too slowly');
  }

  #cut(reason: string): void {
    this.#log('warn', reason);
    this.#end();
  }

  #end(): void {
    if (this.#ended) return;
    this.#ended = true;
    this.#services.heartbeats.delete(this);
    this.#services.presence.drop(this.#link);
    this.#services.cluster?.unlinked(this.#link.machineId, this.#link.id);
    this.#calls.close();
    this.#stream.pause();
    this.#stream.end();
    this.#services.connections.closeSoon(this.#stream.getPeer());
    this.#log('info', 'machine unlinked');
  }

  #log(level: 'info' | 'warn', text: string, more = {}): void {
    this.#services.limits.machine(level, this.#link.machineId, { link_id: this.#link.id, ...more }, text);
  }

  /**
   * Reports two agent processes with one identity, which is the sign of a cloned machine. The newer link has
   * already replaced the older one.
   */
  #recordTakeover(older: Link): void {
    if (older.instanceId === this.#link.instanceId) return;
    const text =
      'two agents linked as this machine, so the earlier link was ended; if the machine was cloned, give the copy another data directory and a join token of its own';
    this.#log('warn', text, { fenced: older.id });
    const machine = this.#services.state.machines.get(this.#link.machineId);
    if (machine) this.#services.limits.takeover({ machine, fenced_link: older.id, link_id: this.#link.id });
  }
}

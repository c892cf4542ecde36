// The control stream of one agent: challenge, hello, welcome, then heartbeats and small calls until either side ends it.
import { randomBytes } from 'node:crypto';
import type { ServerDuplexStream } from '@grpc/grpc-js';
import { status as grpcStatus } from '@grpc/grpc-js';
import type { ConnectRequest__Output } from '../../proto/types/farhand/link/v1/ConnectRequest.ts';
import type { ConnectResponse } from '../../proto/types/farhand/link/v1/ConnectResponse.ts';
import type { Heartbeat__Output } from '../../proto/types/farhand/link/v1/Heartbeat.ts';
import type { Hello__Output } from '../../proto/types/farhand/link/v1/Hello.ts';
import { after, every, monotonic, mostSkewMs, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import { openTerminals, terminalClients } from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
import { verifyProof } from '../../shared/proof.ts';
import { methods, protocolVersion } from '../../shared/rpc.ts';
import { keptProcesses, type Link, type Presence } from '../presence/index.ts';
import type { MachineFacts } from '../presence/machine-facts.ts';
import type { Machine, State } from '../state/index.ts';
import { Calls, type Switchboard } from './calls.ts';
import type { LinkLimits } from './limits.ts';

export type ConnectStream = ServerDuplexStream<ConnectRequest__Output, ConnectResponse>;

export interface ConnectRooms {
  state: State;
  presence: Presence;
  machineFacts: MachineFacts;
  switchboard: Switchboard;
  fingerprint: string;
  limits: LinkLimits;
  log: Logger;
}

export interface ConnectSettings {
  heartbeatMs: number;
  silenceMs: number;
  frameBytes: number;
  /** Streaming calls open at once on one machine: so many short ones, and as many transfers. */
  openCalls: number;
  /** The same for those that follow commands, for terminals with their clients, and for those that watch files. */
  openFollows: number;
  openTerminals: number;
  openWatches: number;
  messageBytes: number;
  /** Longest silence of a machine in the middle of a streaming call. */
  callIdleMs: number;
}

export const defaultSettings: ConnectSettings = {
  heartbeatMs: 15_000,
  silenceMs: 45_000,
  frameBytes: 256 * 1024,
  openCalls: 32,
  openFollows: 96,
  openTerminals: openTerminals + terminalClients,
  openWatches: 32,
  messageBytes: 1024 * 1024 + 64 * 1024,
  callIdleMs: 60_000,
};

/** Time for a hello, also on a connection that has proven itself before. */
const helloMs = 5_000;
/** An agent that does not read its control stream is cut when this much waits for it. */
const maxUnreadBytes = 4 * 1024 * 1024;
/** Ids that a machine makes are written into records of ours. */
const plainId = /^[\x20-\x7e]{0,200}$/;
/** What newId makes of a machine. */
const machineId = /^mach_[0-9A-Za-z]{22}$/;
/** So many as a machine may tell of, and one that shows there are more. */
const mostCapabilities = 64 + 1;
/** Messages that nobody has asked for and that may come at once; so many more come in the time of a heartbeat. */
const mostUnasked = 2_000;
const unaskedPerBeat = 500;
const reportsPerBeat = 20;
/** About what a message takes besides its request. */
const headBytes = 256;

/** The connection of a link: it stays once authenticated, and is closed when its link has ended. */
interface LinkConnection {
  authenticate(): void;
  closeSoon(): void;
}

/** What a session is made of. */
interface SessionParts {
  stream: ConnectStream;
  machine: Machine;
  hello: Hello__Output;
  /** Where it came from. */
  address: string;
  connection: LinkConnection;
  rooms: ConnectRooms;
  settings: ConnectSettings;
}

/** Serves one control stream to its end. */
export async function serveConnect(
  stream: ConnectStream,
  address: string,
  connection: LinkConnection,
  rooms: ConnectRooms,
  settings: ConnectSettings,
): Promise<void> {
  const nonce = randomBytes(32);
  // grpc-js types what it reads as any; the service decodes nothing else.
  const messages = (stream as AsyncIterable<ConnectRequest__Output>)[Symbol.asyncIterator]();
  stream.write({ challenge: { nonce } });
  const cancelDeadline = after(helloMs, () =>
    refuse(stream, grpcStatus.DEADLINE_EXCEEDED, 'no hello in time'),
  );
  const first = await messages.next().finally(cancelDeadline);
  const hello = first.done ? undefined : first.value.hello;
  if (!hello) return refuse(stream, grpcStatus.INVALID_ARGUMENT, 'the first message must be a hello');
  const machine = authenticate(stream, hello, nonce, address, rooms);
  if (!machine) return;
  connection.authenticate();
  if (!rooms.limits.admits(machine.id)) {
    connection.closeSoon();
    return refuse(stream, grpcStatus.RESOURCE_EXHAUSTED, 'this machine links too often: wait a minute');
  }
  const session = new Session({ stream, machine, hello, address, connection, rooms, settings });
  await session.run(messages).catch((error: unknown) => {
    rooms.limits.machine('warn', machine.id, { address, err: error }, 'a link broke off');
    connection.closeSoon();
    refuse(stream, grpcStatus.INTERNAL, textOf(error));
  });
}

/** The machine that this hello proves to be; undefined once it is refused. */
function authenticate(
  stream: ConnectStream,
  hello: Hello__Output,
  nonce: Buffer,
  address: string,
  { state, fingerprint, limits }: ConnectRooms,
): Machine | undefined {
  const { machine_id } = hello;
  const possible = machineId.test(machine_id);
  const machine = state.machines.get(machine_id);
  if (possible && !machine) {
    limits.unauthenticated(address, { machine_id }, 'an agent of no registered machine was told to stop');
    stream.write({ removed: { reason: 'this machine is not registered here' } });
    return void stream.end();
  }
  const ids = [hello.instance_id, hello.journal_id];
  const proof = { nonce, machine_id, fingerprint };
  if (machine && !verifyProof(proof, hello.signature, Buffer.from(machine.public_key, 'base64'))) {
    limits.unauthenticated(address, { machine_id }, 'an agent failed its challenge');
    const text = 'the challenge was not answered with this machine’s key';
    return refuse(stream, grpcStatus.UNAUTHENTICATED, text);
  }
  if (hello.protocol > protocolVersion) {
    const text = 'this agent is newer than the broker: update the broker';
    return refuse(stream, grpcStatus.FAILED_PRECONDITION, text);
  }
  if (possible && ids.every((id) => plainId.test(id))) return machine;
  return refuse(stream, grpcStatus.INVALID_ARGUMENT, 'an id in this hello cannot be one');
}

function refuse(stream: ConnectStream, code: grpcStatus, details: string): undefined {
  stream.emit('error', { code, details });
}

export function textOf(error: unknown): string {
  return error instanceof AppError ? error.message : 'unexpected failure, see the broker’s log';
}

/** An authenticated link until its end. */
class Session implements Link {
  readonly id = newId('link');
  readonly machineId: string;
  readonly instanceId: string;
  readonly journalId: string;
  readonly methods: readonly string[];
  readonly processIds: readonly string[];
  readonly #parts: SessionParts;
  readonly #calls: Calls;
  #heardAt = monotonic();
  #ended = false;
  #unread = 0;
  #unasked = 0;
  #reports = 0;
  #clockIsOff = false;

  constructor(parts: SessionParts) {
    const { machine, hello, rooms, settings } = parts;
    this.#parts = parts;
    this.machineId = machine.id;
    this.instanceId = hello.instance_id;
    // An agent without a journal of processes: what it ran is lost with the agent.
    this.journalId = hello.journal_id || hello.instance_id || this.id;
    this.methods = hello.methods.filter((name) => methods.has(name));
    this.processIds = keptProcesses(hello.process_ids);
    const open = Math.min(settings.openCalls, hello.limits?.open_calls || settings.openCalls);
    this.#calls = new Calls({
      machineId: machine.id,
      methods: this.methods,
      maxOpen: {
        short: open,
        bulk: open,
        process: settings.openFollows,
        terminal: settings.openTerminals,
        watch: settings.openWatches,
      },
      idleMs: settings.callIdleMs,
      send: (message) => this.#send(message),
      switchboard: rooms.switchboard,
    });
  }

  get stub() {
    return this.#calls.stub;
  }

  fence(reason: string): void {
    this.#finish({ fenced: { reason } });
  }

  dismiss(reason: string): void {
    this.#finish({ removed: { reason } });
  }

  drain(retryAfterMs: number): void {
    this.#finish({ drain: { retry_after_ms: retryAfterMs } });
  }

  async run(messages: AsyncIterator<ConnectRequest__Output>): Promise<void> {
    const { stream, rooms, settings, hello, address } = this.#parts;
    const { host, agent_version, metrics } = hello;
    const capabilities = hello.capabilities.slice(0, mostCapabilities);
    const facts = { hostname: host?.hostname ?? '', os: host?.os ?? '', arch: host?.arch ?? '' };
    await rooms.machineFacts.hello(
      this.machineId,
      { ...facts, agent_version, capabilities, ip: address },
      metrics,
    );
    // It may have been removed while its facts were written.
    if (!rooms.state.machines.has(this.machineId)) return this.dismiss('this machine was removed');
    this.#welcome();
    if (metrics) this.#watchClock();
    const older = rooms.presence.add(this);
    if (older) this.#recordTakeover(older);
    this.#log('info', 'machine linked', { address, agent_version });
    const stopBeating = every(settings.heartbeatMs, () => {
      this.#unasked = Math.max(0, this.#unasked - unaskedPerBeat);
      this.#reports = 0;
      this.#send({ heartbeat: {} });
    });
    const stopWatching = every(Math.min(1_000, settings.silenceMs / 4), () => this.#watch());
    stream.once('cancelled', () => this.#end());
    try {
      for (;;) {
        const next = await messages.next();
        if (next.done || this.#ended) break;
        this.#take(next.value);
      }
    } catch (error) {
      rooms.log.debug({ err: error, machine_id: this.machineId }, 'control stream broke');
    } finally {
      stopBeating();
      stopWatching();
      this.#end();
    }
  }

  #welcome(): void {
    const { heartbeatMs, silenceMs, frameBytes, openCalls, messageBytes } = this.#parts.settings;
    this.#send({
      welcome: {
        link_id: this.id,
        limits: { frame_bytes: frameBytes, open_calls: openCalls, message_bytes: messageBytes },
        time_ms: now(),
        heartbeat_ms: heartbeatMs,
        silence_ms: silenceMs,
      },
    });
  }

  #take(message: ConnectRequest__Output): void {
    this.#heardAt = monotonic();
    if (!message.reply || !this.#calls.reply(message.reply)) this.#countUnasked();
    if (message.heartbeat) this.#report(message.heartbeat.metrics);
    if (message.farewell) this.#end();
  }

  /** Reports that come faster than we asked for are no news: to read each would cost everybody else. */
  #report(metrics: Heartbeat__Output['metrics']): void {
    this.#reports += 1;
    const news = this.#reports > reportsPerBeat ? undefined : metrics;
    this.#parts.rooms.machineFacts.heard(this.machineId, news);
    this.#watchClock();
  }

  /** A clock that is far off makes people wonder about times and certificates: logged once, and again after it was right. */
  #watchClock(): void {
    const { machine, rooms } = this.#parts;
    const clock_offset_ms = rooms.machineFacts.of(this.machineId)?.report?.clock_offset_ms ?? 0;
    const isOff = Math.abs(clock_offset_ms) > mostSkewMs;
    if (isOff && !this.#clockIsOff) {
      const text = `the machine’s clock is ${clock_offset_ms < 0 ? 'behind' : 'ahead of'} the broker’s: let both follow a time server`;
      this.#log('warn', text, { machine: machine.name, clock_offset_ms });
    }
    this.#clockIsOff = isOff;
  }

  #countUnasked(): void {
    this.#unasked += 1;
    if (this.#unasked > mostUnasked) this.#cut('the agent sends more than anybody has asked for');
  }

  /** Looked at often, so that silence is noticed when it is over the limit and not a heartbeat later. */
  #watch(): void {
    if (monotonic() - this.#heardAt >= this.#parts.settings.silenceMs) this.#cut('machine fell silent');
  }

  #send(message: ConnectResponse): void {
    if (this.#ended) return;
    // The stream itself counts messages.
    const bytes = (message.call?.request?.length ?? 0) + headBytes;
    this.#unread += bytes;
    this.#parts.stream.write(message, () => {
      this.#unread -= bytes;
    });
    if (this.#unread > maxUnreadBytes) this.#cut('the agent does not read its control stream');
  }

  /** A last message, then the end. */
  #finish(message: ConnectResponse): void {
    this.#send(message);
    this.#end();
  }

  #cut(reason: string): void {
    this.#log('warn', reason);
    this.#end();
  }

  #end(): void {
    if (this.#ended) return;
    this.#ended = true;
    const { rooms, stream, connection } = this.#parts;
    rooms.presence.drop(this);
    this.#calls.close();
    stream.end();
    connection.closeSoon();
    this.#log('info', 'machine unlinked');
  }

  #log(level: 'info' | 'warn', text: string, more = {}): void {
    this.#parts.rooms.limits.machine(level, this.machineId, { link_id: this.id, ...more }, text);
  }

  /** A cloned machine shows as another agent process that takes over a link which still lives. */
  #recordTakeover(older: Link): void {
    if (older.instanceId === this.instanceId) return;
    const { machine, rooms } = this.#parts;
    this.#log('warn', 'two agents use one identity; the older was fenced off', { fenced: older.id });
    rooms.limits.takeover({ machine, fenced_link: older.id, link_id: this.id });
  }
}

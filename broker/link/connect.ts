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
import type { Vitals } from '../machines/vitals.ts';
import type { Machine, State } from '../state/index.ts';
import { type Calls, openCalls, type Switchboard } from './calls.ts';
import type { Fences } from './fences.ts';
import type { Notices } from './notices.ts';
import { keptProcesses, type Link, type Presence } from './presence.ts';

export type ConnectStream = ServerDuplexStream<ConnectRequest__Output, ConnectResponse>;

export interface ConnectRooms {
  state: State;
  presence: Presence;
  vitals: Vitals;
  switchboard: Switchboard;
  fingerprint: string;
  notices: Notices;
  fences: Fences;
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
  const cancelPatience = after(helloMs, () =>
    refuse(stream, grpcStatus.DEADLINE_EXCEEDED, 'no hello in time'),
  );
  const first = await messages.next().finally(cancelPatience);
  const hello = first.done ? undefined : first.value.hello;
  if (!hello) return refuse(stream, grpcStatus.INVALID_ARGUMENT, 'the first message must be a hello');
  if (!machineId.test(hello.machine_id)) return refuse(stream, grpcStatus.INVALID_ARGUMENT, noId);
  const { notices } = rooms;
  const machine = rooms.state.machines.get(hello.machine_id);
  if (!machine) {
    notices.stranger(
      address,
      { machine_id: hello.machine_id },
      'an agent of no registered machine was told to stop',
    );
    return dismissUnknown(stream);
  }
  const proof = { nonce, machine_id: machine.id, fingerprint: rooms.fingerprint };
  if (!verifyProof(proof, hello.signature, Buffer.from(machine.public_key, 'base64'))) {
    notices.stranger(address, { machine_id: machine.id }, 'an agent failed its challenge');
    return refuse(
      stream,
      grpcStatus.UNAUTHENTICATED,
      'the challenge was not answered with this machine’s key',
    );
  }
  if (hello.protocol > protocolVersion) {
    return refuse(
      stream,
      grpcStatus.FAILED_PRECONDITION,
      'this agent is newer than the broker: update the broker',
    );
  }
  if (![hello.instance_id, hello.journal_id].every((id) => plainId.test(id)))
    return refuse(stream, grpcStatus.INVALID_ARGUMENT, noId);
  connection.authenticate();
  if (!rooms.fences.admit(machine.id)) {
    connection.closeSoon();
    return refuse(stream, grpcStatus.RESOURCE_EXHAUSTED, 'this machine links too often: wait a minute');
  }
  await new Session(stream, machine, hello, connection, rooms, settings)
    .run(messages, address)
    .catch((error: unknown) => {
      notices.machine('warn', machine.id, { address, err: error }, 'a link broke off');
      connection.closeSoon();
      refuse(stream, grpcStatus.INTERNAL, textOf(error));
    });
}

const noId = 'an id in this hello cannot be one';

function refuse(stream: ConnectStream, code: grpcStatus, details: string): void {
  stream.emit('error', { code, details });
}

export function textOf(error: unknown): string {
  return error instanceof AppError ? error.message : 'unexpected failure, see the broker’s log';
}

function dismissUnknown(stream: ConnectStream): void {
  stream.write({ removed: { reason: 'this machine is not registered here' } });
  stream.end();
}

/** A proven link until its end. */
class Session implements Link {
  readonly id = newId('link');
  readonly machineId: string;
  readonly instanceId: string;
  readonly journalId: string;
  readonly methods: readonly string[];
  readonly processIds: readonly string[];
  readonly #stream: ConnectStream;
  readonly #machine: Machine;
  readonly #hello: Hello__Output;
  readonly #connection: LinkConnection;
  readonly #rooms: ConnectRooms;
  readonly #settings: ConnectSettings;
  readonly #calls: Calls;
  #heardAt = monotonic();
  #ended = false;
  #unread = 0;
  #unasked = 0;
  #reports = 0;
  #apart = false;

  constructor(
    stream: ConnectStream,
    machine: Machine,
    hello: Hello__Output,
    connection: LinkConnection,
    rooms: ConnectRooms,
    settings: ConnectSettings,
  ) {
    this.#stream = stream;
    this.#machine = machine;
    this.#hello = hello;
    this.#connection = connection;
    this.#rooms = rooms;
    this.#settings = settings;
    this.machineId = machine.id;
    this.instanceId = hello.instance_id;
    this.journalId = hello.journal_id;
    this.methods = hello.methods.filter((name) => methods.has(name));
    this.processIds = keptProcesses(hello.process_ids);
    const open = Math.min(settings.openCalls, hello.limits?.open_calls || settings.openCalls);
    this.#calls = openCalls({
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

  async run(messages: AsyncIterator<ConnectRequest__Output>, address: string): Promise<void> {
    const { state, presence, vitals, log } = this.#rooms;
    const { host, agent_version, metrics } = this.#hello;
    const capabilities = this.#hello.capabilities.slice(0, mostCapabilities);
    const facts = { hostname: host?.hostname ?? '', os: host?.os ?? '', arch: host?.arch ?? '' };
    await vitals.hello(this.machineId, { ...facts, agent_version, capabilities, ip: address }, metrics);
    // It may have been removed while its facts were written.
    if (!state.machines.has(this.machineId)) return this.dismiss('this machine was removed');
    this.#welcome();
    if (metrics) this.#watchClock();
    const older = presence.add(this);
    if (older) this.#recordFence(older);
    this.#note('info', 'machine linked', { address, agent_version });
    const stopBeating = every(this.#settings.heartbeatMs, () => {
      this.#unasked = Math.max(0, this.#unasked - unaskedPerBeat);
      this.#reports = 0;
      this.#send({ heartbeat: {} });
    });
    const stopWatching = every(Math.min(1_000, this.#settings.silenceMs / 4), () => this.#watch());
    this.#stream.once('cancelled', () => this.#end());
    try {
      for (;;) {
        const next = await messages.next();
        if (next.done || this.#ended) break;
        this.#take(next.value);
      }
    } catch (error) {
      log.debug({ err: error, machine_id: this.machineId }, 'control stream broke');
    } finally {
      stopBeating();
      stopWatching();
      this.#end();
    }
  }

  #welcome(): void {
    const { heartbeatMs, silenceMs, frameBytes, openCalls: open_calls, messageBytes } = this.#settings;
    this.#send({
      welcome: {
        link_id: this.id,
        limits: { frame_bytes: frameBytes, open_calls, message_bytes: messageBytes },
        time_ms: now(),
        heartbeat_ms: heartbeatMs,
        silence_ms: silenceMs,
      },
    });
  }

  #take(message: ConnectRequest__Output): void {
    this.#heardAt = monotonic();
    if (!message.reply || !this.#calls.reply(message.reply)) this.#endure();
    if (message.heartbeat) this.#hear(message.heartbeat.metrics);
    if (message.farewell) this.#end();
  }

  /** Reports that come faster than they are told to are no news: to read each would cost everybody else. */
  #hear(metrics: Heartbeat__Output['metrics']): void {
    this.#reports += 1;
    this.#rooms.vitals.heard(this.machineId, this.#reports > reportsPerBeat ? undefined : metrics);
    this.#watchClock();
  }

  /** A clock that is far off makes everybody wonder about times, and certificates: said once, and again after it was right. */
  #watchClock(): void {
    const offset = this.#rooms.vitals.of(this.machineId)?.report?.clock_offset_ms ?? 0;
    const apart = Math.abs(offset) > mostSkewMs;
    if (apart && !this.#apart) {
      const about = { machine: this.#machine.name, clock_offset_ms: offset };
      const text = `the machine’s clock is ${offset < 0 ? 'behind' : 'ahead of'} the broker’s: let both follow a time server`;
      this.#note('warn', text, about);
    }
    this.#apart = apart;
  }

  /** A machine that floods us with what nobody waits for is cut. */
  #endure(): void {
    this.#unasked += 1;
    if (this.#unasked <= mostUnasked) return;
    this.#note('warn', 'the agent sends more than anybody has asked for');
    this.#end();
  }

  /** Looked at often, so that silence is noticed when it is over the limit and not a heartbeat later. */
  #watch(): void {
    if (monotonic() - this.#heardAt < this.#settings.silenceMs) return;
    this.#note('warn', 'machine fell silent');
    this.#end();
  }

  #send(message: ConnectResponse): void {
    if (this.#ended) return;
    // The stream itself counts messages.
    const bytes = (message.call?.request?.length ?? 0) + headBytes;
    this.#unread += bytes;
    this.#stream.write(message, () => {
      this.#unread -= bytes;
    });
    if (this.#unread <= maxUnreadBytes) return;
    this.#note('warn', 'the agent does not read its control stream');
    this.#end();
  }

  /** A last message, then the end. */
  #finish(message: ConnectResponse): void {
    this.#send(message);
    this.#end();
  }

  #end(): void {
    if (this.#ended) return;
    this.#ended = true;
    this.#rooms.presence.drop(this);
    this.#calls.close();
    this.#stream.end();
    this.#connection.closeSoon();
    this.#note('info', 'machine unlinked');
  }

  #note(level: 'info' | 'warn', text: string, more = {}): void {
    this.#rooms.notices.machine(level, this.machineId, { link_id: this.id, ...more }, text);
  }

  /** A cloned machine shows as another agent process that takes over a link which still lives. */
  #recordFence(older: Link): void {
    if (older.instanceId === this.instanceId) return;
    const text = 'two agents use one identity; the older was fenced off';
    this.#note('warn', text, { fenced: older.id });
    this.#rooms.fences.fenced({ machine: this.#machine, fenced_link: older.id, link_id: this.id });
  }
}

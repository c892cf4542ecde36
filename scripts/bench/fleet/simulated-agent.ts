// One simulated agent: enrols, links, reports, answers and reconnects as docs/agent-protocol.md describes. An agent has
// no timer: its process calls tick() every few milliseconds.
import { type KeyObject, sign } from 'node:crypto';
import {
  type ClientHttp2Session,
  type ClientHttp2Stream,
  connect,
  type IncomingHttpHeaders,
} from 'node:http2';
import { connect as connectTcp } from 'node:net';
import { connect as connectTls, type SecureContext } from 'node:tls';
import type { ConnectResponse__Output } from '../../../proto/types/farhand/link/v1/ConnectResponse.ts';
import { decode, decodeIncoming, encode, FrameReader, frame } from './proto-and-grpc-frames.ts';
import { capabilities, SimulatedMachine, served } from './simulated-reports-and-answers.ts';

/** How an agent dials its broker. */
export interface Way {
  host: string;
  port: number;
  /** Source address of the connection. One address has too few ports for a whole fleet on one host. */
  source: string;
  /** A TLS context that trusts only the pinned CA. */
  context: SecureContext;
  /** SHA-256 of the pinned CA in hexadecimal. */
  fingerprint: string;
}

export interface Identity {
  machineId: string;
  privateKey: KeyObject;
}

/** Sums over all agents of a process. */
export interface Counts {
  dials: number;
  /** Number of dials at a port on which no broker listened. */
  refused: number;
  welcomes: number;
  calls: number;
  /** Number of ended links, by reason. */
  ends: Record<string, number>;
}

const serverName = 'farhand-broker';
const context = 'farhand-link-v1';
const dialMs = 30_000;
const welcomeMs = 10_000;
const firstCeilingMs = 500;
const lastCeilingMs = 30_000;
const fencedMs = 30_000;
const limitedMs = 60_000;
const statusResourceExhausted = '8';
const version = '0.1.0';

type Phase = 'waiting' | 'dialling' | 'greeting' | 'linked' | 'ended';

export class SimulatedAgent {
  readonly machine: SimulatedMachine;
  readonly #ways: readonly Way[];
  /** The addresses for the next dials, in this order. */
  #left: Way[] = [];
  #last: Way | undefined;
  readonly #identity: Identity;
  readonly #counts: Counts;
  readonly #instanceId = `instance-${process.pid}-${performance.now()}`;
  readonly #journalId = `journal-${process.pid}-${performance.now()}`;
  /**
   * Time from the link to the first heartbeat, as a fraction (0 to 1) of the heartbeat interval. Agents have different
   * fractions, so that the heartbeats of a fleet are spread evenly.
   */
  readonly #share: number;
  #phase: Phase = 'waiting';
  #session: ClientHttp2Session | undefined;
  #stream: ClientHttp2Stream | undefined;
  /**
   * When the present phase ends, in milliseconds of performance.now(). A waiting agent then dials, and an unfinished
   * dial fails.
   */
  #dueAt = 0;
  /** Time of the first failure since the last link, in milliseconds of performance.now(). */
  #failedAt: number | undefined;
  #ceilingMs = firstCeilingMs;
  #heardAt = 0;
  #beatAt = 0;
  #beatMs = 0;
  #silenceMs = 0;

  constructor(
    name: string,
    ways: readonly Way[],
    first: Way,
    identity: Identity,
    counts: Counts,
    share: number,
  ) {
    this.machine = new SimulatedMachine(name);
    this.#ways = ways;
    this.#identity = identity;
    this.#counts = counts;
    this.#share = share;
    this.#last = first;
  }

  get isLinked(): boolean {
    return this.#phase === 'linked';
  }

  /** SHA-256 of the pinned CA, which is the same for all brokers. */
  get #fingerprint(): string {
    return this.#ways[0]?.fingerprint ?? '';
  }

  get isDialling(): boolean {
    return this.#phase === 'dialling' || this.#phase === 'greeting';
  }

  /** Does the work that is due now. A waiting agent dials only if `mayDial` is true. */
  tick(now: number, mayDial: boolean): void {
    if (this.#phase === 'ended') return;
    if (this.#phase === 'linked') this.#watch(now);
    else if (now < this.#dueAt) return;
    else if (this.#phase !== 'waiting')
      this.#lose(`no ${this.#phase === 'dialling' ? 'challenge' : 'welcome'}`);
    else if (mayDial) this.#dial(now);
  }

  /** Cuts the connection, as a lost network would. */
  cut(): void {
    if (this.#phase === 'linked') this.#lose('cut');
  }

  /** Links the agent over an open connection, the one that it has used to enrol. */
  linkOver(session: ClientHttp2Session): void {
    this.#begin(session, performance.now());
  }

  end(): void {
    this.#phase = 'ended';
    this.#close();
  }

  /**
   * Dials the next broker in `#left`. When `#left` is empty, all brokers are added in random order, but the broker of
   * the previous dial comes last.
   */
  #dial(now: number): void {
    const last = this.#last === undefined ? [] : [this.#last];
    if (this.#left.length === 0)
      this.#left = [...shuffled(this.#ways.filter((way) => way !== this.#last)), ...last];
    const way = this.#left.shift();
    if (!way) return;
    this.#last = way;
    this.#counts.dials += 1;
    this.#begin(dialSession(way), now);
  }

  #begin(session: ClientHttp2Session, now: number): void {
    this.#phase = 'dialling';
    this.#dueAt = now + dialMs;
    this.#session = session;
    const fail = (error: Error): void => {
      if (this.#session !== session) return;
      const code = codeOf(error);
      if (code === 'ECONNREFUSED') this.#counts.refused += 1;
      this.#lose(code);
    };
    session.once('error', fail);
    session.once('close', () => this.#session === session && this.#lose('connection closed'));
    const stream = session.request(headersOf('Connect'), { endStream: false });
    this.#stream = stream;
    const reader = new FrameReader();
    stream.on('data', (chunk: Buffer) => {
      for (const message of reader.push(chunk)) if (this.#stream === stream) this.#receive(message);
    });
    stream.on('error', fail);
    stream.once('response', (headers) => this.#finish(stream, headers['grpc-status']));
    stream.once('trailers', (headers: IncomingHttpHeaders) => this.#finish(stream, headers['grpc-status']));
    stream.once('close', () => this.#stream === stream && this.#lose('stream closed'));
  }

  /** Ends the link when the broker has ended the control stream, that is, when its headers have a gRPC status. */
  #finish(stream: ClientHttp2Stream, status: string | string[] | undefined): void {
    if (status === undefined || this.#stream !== stream) return;
    this.#lose(`status ${String(status)}`, status === statusResourceExhausted ? limitedMs : undefined);
  }

  #receive(bytes: Buffer): void {
    this.#heardAt = performance.now();
    const message = decodeIncoming(bytes);
    switch (message.message) {
      case 'challenge':
        this.#greet(message.challenge?.nonce ?? Buffer.alloc(0));
        break;
      case 'welcome':
        this.#welcome(message);
        break;
      case 'call':
        this.#counts.calls += 1;
        if (message.call)
          this.#send({ reply: { call_id: message.call.call_id, ...this.machine.answer(message.call) } });
        break;
      case 'drain':
        this.#lose('drain', message.drain?.retry_after_ms ?? 0, true);
        break;
      case 'fenced':
        this.#lose('fenced', fencedMs);
        break;
      case 'removed':
        this.#count('removed');
        this.end();
    }
  }

  #greet(nonce: Buffer): void {
    const { machineId, privateKey } = this.#identity;
    const parts = [Buffer.from(context), nonce, Buffer.from(machineId), Buffer.from(this.#fingerprint)];
    const signed = Buffer.concat(parts.flatMap((part) => [Buffer.from([part.length]), part]));
    this.#phase = 'greeting';
    this.#dueAt = performance.now() + welcomeMs;
    this.#send({
      hello: {
        machine_id: machineId,
        signature: sign(null, signed, privateKey),
        protocol: 1,
        agent_version: version,
        boot_id: 'simulated',
        instance_id: this.#instanceId,
        journal_id: this.#journalId,
        methods: served,
        limits: { frame_bytes: 256 * 1024, open_calls: 32, message_bytes: 2 * 1024 * 1024 },
        capabilities,
        host: hostOf(this.machine.hostname),
        metrics: this.machine.report(),
        process_ids: this.machine.processIds,
      },
    });
  }

  #welcome({ welcome }: ConnectResponse__Output): void {
    this.#phase = 'linked';
    this.#left = [];
    this.#counts.welcomes += 1;
    this.#failedAt = undefined;
    this.#ceilingMs = firstCeilingMs;
    this.#beatMs = welcome?.heartbeat_ms ?? 0;
    this.#silenceMs = welcome?.silence_ms ?? 0;
    this.#beatAt = performance.now() + this.#beatMs * this.#share;
  }

  #watch(now: number): void {
    if (now - this.#heardAt > this.#silenceMs) {
      this.#lose('silence');
      return;
    }
    if (now < this.#beatAt) return;
    this.#beatAt += this.#beatMs;
    this.#send({ heartbeat: { metrics: this.machine.report() } });
  }

  #send(message: object): void {
    this.#stream?.write(frame(encode('ConnectRequest', message)));
  }

  /**
   * Ends the link, and plans the next dial in `waitMs` milliseconds. If `andBackoff` is true, a random share of the
   * backoff is added.
   */
  #lose(reason: string, waitMs = 0, andBackoff = waitMs === 0): void {
    this.#count(reason);
    this.#close();
    this.#phase = 'waiting';
    const now = performance.now();
    this.#failedAt ??= now;
    const mostMs = Math.min(this.#ceilingMs, Math.max(firstCeilingMs, now - this.#failedAt));
    if (andBackoff) this.#ceilingMs = Math.min(lastCeilingMs, this.#ceilingMs * 2);
    this.#dueAt = now + waitMs + (andBackoff ? Math.random() * mostMs : 0);
  }

  #close(): void {
    const session = this.#session;
    this.#session = undefined;
    this.#stream = undefined;
    session?.destroy();
  }

  #count(reason: string): void {
    this.#counts.ends[reason] = (this.#counts.ends[reason] ?? 0) + 1;
  }
}

function shuffled<T>(list: readonly T[]): T[] {
  return list
    .map((one) => ({ one, at: Math.random() }))
    .sort((a, b) => a.at - b.at)
    .map(({ one }) => one);
}

/** Returns the code of the system error that ended a session or one of its streams; without a code, the message. */
function codeOf(error: Error): string {
  const { code } = (error.cause ?? error) as NodeJS.ErrnoException;
  return code ?? error.message;
}

/** Dials the broker over TLS 1.3, and checks its certificate against the pinned CA. */
export function dialSession({ host, port, source, context: secureContext }: Way): ClientHttp2Session {
  const session = connect(`https://${serverName}`, {
    createConnection: () =>
      connectTls({
        socket: connectTcp({ host, port, localAddress: source }),
        secureContext,
        servername: serverName,
        ALPNProtocols: ['h2'],
        minVersion: 'TLSv1.3',
      }),
  });
  // Without this listener, an error of a session that no agent uses any more would end the process.
  session.on('error', () => undefined);
  return session;
}

/** Enrols a machine. Returns its id. Rejects with the gRPC status of the broker. */
export async function enroll(
  session: ClientHttp2Session,
  request: { token: string; public_key: Buffer; name: string; tags: string[] },
): Promise<string> {
  const stream = session.request(headersOf('Enroll'), { endStream: false });
  stream.end(
    frame(encode('EnrollRequest', { ...request, host: hostOf(request.name), agent_version: version })),
  );
  return new Promise((resolve, reject) => {
    const reader = new FrameReader();
    const finish = (headers: IncomingHttpHeaders): void => {
      const status = headers['grpc-status'];
      if (status !== undefined && status !== '0')
        reject(new Error(`enrolment ended with ${String(status)}: ${String(headers['grpc-message'])}`));
    };
    stream.on('data', (chunk: Buffer) => {
      const [message] = reader.push(chunk);
      if (message) resolve(decode<{ machine_id: string }>('EnrollResponse', message).machine_id);
    });
    stream.once('response', finish);
    stream.once('trailers', finish);
    stream.once('error', reject);
    stream.once('close', () => reject(new Error('the broker closed the enrolment stream without an answer')));
  });
}

function headersOf(rpc: string): Record<string, string> {
  return {
    ':method': 'POST',
    ':path': `/farhand.link.v1.Link/${rpc}`,
    'content-type': 'application/grpc',
    te: 'trailers',
  };
}

const hostOf = (hostname: string): object => ({ hostname, os: 'linux', arch: 'x64' });

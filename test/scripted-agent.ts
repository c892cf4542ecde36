// An agent that breaks the protocol as the test chooses: a wrong hello, incomplete answers, two answers, no answer.
import { EventEmitter, once } from 'node:events';
import { onTestFinished } from 'vitest';
import { loadIdentity } from '../agent/join-or-load-identity.ts';
import { type AnswerStream, type ControlStream, Dial } from '../agent/link/dial.ts';
import type { Identity } from '../agent/link/index.ts';
import type { Call__Output } from '../proto/types/farhand/link/v1/Call.ts';
import type { ConnectRequest } from '../proto/types/farhand/link/v1/ConnectRequest.ts';
import type { ConnectResponse__Output } from '../proto/types/farhand/link/v1/ConnectResponse.ts';
import type { Hello } from '../proto/types/farhand/link/v1/Hello.ts';
import { methods, protocolVersion } from '../shared/agent-rpcs.ts';
import { signProof } from '../shared/identity-proof.ts';
import { type TestSystem, temporaryFolder } from './start-farhand.ts';

type Kind = Exclude<keyof ConnectResponse__Output, 'message'>;

/** Resolves with the gRPC status code of a stream. */
export function statusOf(stream: AnswerStream): Promise<number> {
  return new Promise((resolve) => {
    stream.resume();
    stream.once('status', ({ code }) => resolve(code));
  });
}

export interface ScriptedAgent {
  identity: Identity;
  line: Dial;
  control: ControlStream;
  /** Resolves with the next unread message of this kind. Rejects if the stream ends first. */
  next<K extends Kind>(kind: K): Promise<NonNullable<ConnectResponse__Output[K]>>;
  /** Resolves with the next unread call of this method. Calls of other methods stay unread. */
  nextCallOf(method: string): Promise<Call__Output>;
  /** Returns the number of unread calls of this method. */
  unreadCallsOf(method: string): number;
  send(message: ConnectRequest): void;
  /** Opens the stream for the answer to a call. */
  answer(callId: string): AnswerStream;
  /** Answers a call with these messages and the end of the answer, on a stream of its own. */
  answerWith(call: Call__Output, ...messages: object[]): void;
  /** Encodes a response of this method. */
  encode(method: string, response: object): Buffer;
  decode(call: Call__Output): unknown;
  /** Resolves when the control stream has ended, with its gRPC status code. */
  ended: Promise<number>;
  close(): void;
}

const metrics = { recorded_at_ms: 1, cpu_cores: 1, memory: {}, disk: {} };

/** Joins as a new machine without connecting. */
export async function joinScripted(
  system: Pick<TestSystem, 'grpc' | 'joinToken'>,
  name = 'scripted',
): Promise<Identity> {
  const joinToken = await system.joinToken();
  return loadIdentity(temporaryFolder('scripted'), { broker: system.grpc, joinToken, name, tags: [] });
}

/**
 * Connects, waits for the challenge and answers with a valid hello. Fields of `hello` replace fields of that hello. If
 * `hello` is null, sends none.
 */
export async function connectScripted(
  broker: string,
  identity: Identity,
  hello: Partial<Hello> | null = {},
): Promise<ScriptedAgent> {
  const line = new Dial(broker, identity.caCertificate);
  const control = line.connect();
  const seen: ConnectResponse__Output[] = [];
  const arrived = new EventEmitter().setMaxListeners(0);
  let code: number | undefined;
  const ended = new Promise<number>((resolve) => {
    control.once('status', (status) => {
      code = status.code;
      arrived.emit('message');
      resolve(status.code);
    });
  });
  control.on('error', () => undefined);
  control.on('data', (message: ConnectResponse__Output) => {
    seen.push(message);
    arrived.emit('message');
  });
  /** Reads the first unread message for which `find` returns a value. Resolves with this value. */
  const take = async <T>(
    what: string,
    find: (message: ConnectResponse__Output) => T,
  ): Promise<NonNullable<T>> => {
    for (;;) {
      for (const [at, message] of seen.entries()) {
        const found = find(message);
        if (!found) continue;
        seen.splice(at, 1);
        return found;
      }
      if (code !== undefined) throw new Error(`the stream ended with ${code} before a ${what}`);
      await once(arrived, 'message');
    }
  };
  const agent: ScriptedAgent = {
    identity,
    line,
    control,
    next: (kind) => take(kind, (message) => message[kind]),
    nextCallOf: (method) =>
      take(`call of ${method}`, ({ call }) => (call?.method === method ? call : undefined)),
    unreadCallsOf: (method) => seen.filter(({ call }) => call?.method === method).length,
    send: (message) => void control.write(message),
    answer(callId) {
      // All streams share one connection, so that their order is fixed. A real agent has two connections.
      const stream = line.answer(callId, true);
      stream.on('error', () => undefined);
      return stream;
    },
    answerWith({ call_id, method }, ...messages) {
      const stream = agent.answer(call_id).resume();
      for (const message of messages) stream.write({ message: agent.encode(method, message) });
      stream.write({ end: {} });
      stream.end();
    },
    encode: (method, response) => shapeOf(method).encodeResponse(response),
    decode: (call) => shapeOf(call.method).decodeRequest(call.request),
    ended,
    close: () => line.close(),
  };
  onTestFinished(() => agent.close());
  const { nonce } = await agent.next('challenge');
  if (hello) agent.send({ hello: { ...goodHello(identity, nonce), ...hello } });
  return agent;
}

/** Connects like connectScripted(). Resolves when the agent is linked. */
export async function linkScripted(
  broker: string,
  identity: Identity,
  hello: Partial<Hello> = {},
): Promise<ScriptedAgent> {
  const agent = await connectScripted(broker, identity, hello);
  await agent.next('welcome');
  return agent;
}

/** Links a new machine that does nothing by itself. */
export async function scriptedMachine(
  system: TestSystem,
  hello: Partial<Hello> = {},
): Promise<ScriptedAgent> {
  return linkScripted(system.grpc, await joinScripted(system), hello);
}

function goodHello(identity: Identity, nonce: Buffer): Hello {
  const { machineId: machine_id, fingerprint, privateKey } = identity;
  return {
    machine_id,
    signature: signProof({ nonce, machine_id, fingerprint }, privateKey),
    protocol: protocolVersion,
    agent_version: '0.0.0',
    boot_id: 'boot',
    instance_id: 'scripted',
    journal_id: 'journal',
    methods: [...methods.keys()],
    capabilities: [
      'metrics',
      'inventory',
      'files:read',
      'files:write',
      'exec',
      'terminal',
      'user',
      'upgrade',
    ],
    roots: ['/'],
    host: { hostname: 'scripted', os: 'linux', arch: 'x64' },
    metrics,
    process_ids: [],
  };
}

function shapeOf(method: string) {
  const shape = methods.get(method);
  if (!shape) throw new Error(`there is no method ${method}`);
  return shape;
}

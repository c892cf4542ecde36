// A broker that sends an agent any call, whether the agent allows it or not.
import { Server, ServerCredentials } from '@grpc/grpc-js';
import { onTestFinished } from 'vitest';
import { agentSettings } from '../agent/settings-schema.ts';
import { type Agent, startAgent } from '../agent/start.ts';
import { loadAuthority } from '../broker/ca-and-broker-certificates.ts';
import type { AnswerStream } from '../broker/link/agent-calls.ts';
import type { ConnectStream } from '../broker/link/control-stream.ts';
import type { Call } from '../proto/types/farhand/link/v1/Call.ts';
import type { Hello__Output } from '../proto/types/farhand/link/v1/Hello.ts';
import type { LinkHandlers } from '../proto/types/farhand/link/v1/Link.ts';
import { callKey, fromWire, linkService, type Method, methods } from '../shared/agent-rpcs.ts';
import { newId, newSecret } from '../shared/ids-and-secrets.ts';
import { joinTokenText } from '../shared/join-token.ts';
import { readSettings } from '../shared/read-settings.ts';
import { quiet, temporaryFolder } from './start-farhand.ts';

export interface Outcome {
  /** The error code of the refusal, or "ok". */
  code: string;
  details: Record<string, unknown>;
}

export interface ScriptedBroker {
  /** Starts a real agent. Resolves once it is linked. */
  agent(flags?: string[], dataDir?: string): Promise<{ agent: Agent; hello: Hello__Output; dataDir: string }>;
  /** Calls the agent that linked last. */
  call(method: Method, request: object, more?: Partial<Call>): Promise<Outcome>;
}

export async function scriptedBroker(): Promise<ScriptedBroker> {
  const authority = await loadAuthority(temporaryFolder('authority'), true);
  const leaf = await authority.leaf();
  const waiting = new Map<string, (outcome: Outcome) => void>();
  let control: ConnectStream | undefined;
  let linked = (_: Hello__Output): void => {};
  const handlers: LinkHandlers = {
    Enroll: (_, reply) => reply(null, { machine_id: newId('machine'), name: 'owned' }),
    Connect(stream: ConnectStream) {
      control = stream;
      stream.on('error', () => undefined);
      stream.on('data', ({ hello, reply, farewell }) => {
        if (hello) {
          stream.write({ welcome: { heartbeat_ms: 60_000, silence_ms: 60_000 } });
          linked(hello);
        }
        if (reply) waiting.get(reply.call_id)?.(outcomeOf(reply.error));
        if (farewell) stream.end();
      });
      stream.write({ challenge: { nonce: Buffer.alloc(32) } });
    },
    Answer(stream: AnswerStream) {
      const settle = waiting.get(String(stream.metadata.get(callKey)[0]));
      stream.on('error', () => undefined);
      stream.on('data', ({ error, end }) => {
        if (!error && !end) return;
        settle?.(outcomeOf(error));
        stream.end();
      });
      // Ends the stream of requests at once, without a request. So a call that expects streamed requests fails, and
      // does not wait for them.
      stream.write({ end: {} });
    },
  };
  const server = new Server();
  server.addService(linkService, handlers);
  const { key: keyPem, cert: certPem } = leaf;
  if (typeof keyPem !== 'string' || typeof certPem !== 'string') throw new Error('there is no leaf');
  const [key, cert] = [Buffer.from(keyPem), Buffer.from(certPem)];
  const port = await new Promise<number>((resolve, reject) => {
    const credentials = ServerCredentials.createSsl(null, [{ private_key: key, cert_chain: cert }]);
    server.bindAsync('127.0.0.1:0', credentials, (error, bound) => (error ? reject(error) : resolve(bound)));
  });
  onTestFinished(() => server.forceShutdown());
  return {
    async agent(flags = [], dataDir = temporaryFolder('owned')) {
      const token = joinTokenText(newSecret(), authority.fingerprint, undefined);
      const argv = ['--broker', `127.0.0.1:${port}`, '--join-token', token, '--data-dir', dataDir, ...flags];
      const greeted = new Promise<Hello__Output>((resolve) => {
        linked = resolve;
      });
      const agent = await startAgent(readSettings(agentSettings, { argv, env: {} }), quiet);
      onTestFinished(() => agent.close());
      return { agent, hello: await greeted, dataDir };
    },
    call(method, request, more = {}) {
      const shape = methods.get(method);
      if (!shape || !control) throw new Error(`${method} cannot be called`);
      const bytes = shape.clientStreams ? Buffer.alloc(0) : shape.encodeRequest(request);
      const call_id = newId('call');
      control.write({ call: { call_id, method, request: bytes, request_id: newId('request'), ...more } });
      return new Promise((resolve) => waiting.set(call_id, resolve));
    },
  };
}

function outcomeOf(error: { code?: string; details?: string } | null | undefined): Outcome {
  if (!error) return { code: 'ok', details: {} };
  const { code, details } = fromWire(error);
  return { code, details };
}

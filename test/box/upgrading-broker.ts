// A broker that upgrades the agent of a container with StageUpgrade, and records what the agent reports. It runs for
// all tests of a file.
import { Server, ServerCredentials } from '@grpc/grpc-js';
import { loadAuthority } from '../../broker/ca-and-broker-certificates.ts';
import type { AnswerStream } from '../../broker/link/agent-calls.ts';
import type { ConnectStream } from '../../broker/link/control-stream.ts';
import type { Hello__Output } from '../../proto/types/farhand/link/v1/Hello.ts';
import type { LastUpgrade__Output } from '../../proto/types/farhand/link/v1/LastUpgrade.ts';
import type { LinkHandlers } from '../../proto/types/farhand/link/v1/Link.ts';
import { callKey, fromWire, linkService, methods, sendFrames } from '../../shared/agent-rpcs.ts';
import { newId, newSecret } from '../../shared/ids-and-secrets.ts';
import { joinTokenText } from '../../shared/join-token.ts';
import { atEnd } from '../close-after-tests.ts';
import { firstMessageFor, type SignedUpgrade } from '../sign-packages.ts';
import { temporaryFolder } from '../start-farhand.ts';

export interface Staged {
  /** Kinds of the answers: staged, waiting, switching. */
  answers: string[];
  /**
   * How the call ended: `ok`, `link lost`, or the reason or code of the error. For a package that root refused, this is
   * the error's message.
   */
  end: string;
}

export interface UpgradingBroker {
  address: string;
  joinToken(): string;
  /** The last hello; undefined while no agent is linked. */
  linked(): Hello__Output | undefined;
  /** The last upgrade as the agent has reported it, by hello or heartbeat. */
  lastUpgrade(): LastUpgrade__Output | null | undefined;
  /** Sends a package. Resolves when the call ends. */
  stage(signed: SignedUpgrade, content: Buffer, more?: object): Promise<Staged>;
}

const pieceBytes = 256 * 1024;

export async function upgradingBroker(): Promise<UpgradingBroker> {
  const authority = await loadAuthority(temporaryFolder('authority'), true);
  const { key, cert } = await authority.leaf();
  const shape = methods.get('StageUpgrade');
  if (typeof key !== 'string' || typeof cert !== 'string' || !shape) throw new Error('no leaf certificate');
  let control: ConnectStream | undefined;
  let hello: Hello__Output | undefined;
  let last: LastUpgrade__Output | null | undefined;
  const calls = new Map<string, Calling>();
  const handlers: LinkHandlers = {
    Enroll: (_, reply) => reply(null, { machine_id: newId('machine'), name: 'box' }),
    Connect(stream: ConnectStream) {
      control = stream;
      stream.on('error', () => undefined);
      stream.on('close', () => {
        if (control !== stream) return;
        [control, hello] = [undefined, undefined];
        for (const { end } of calls.values()) end('link lost');
      });
      stream.on('data', (message) => {
        if (message.hello) {
          stream.write({ welcome: { heartbeat_ms: 1_000, silence_ms: 20_000 } });
          hello = message.hello;
          last = message.hello.installation?.last_upgrade;
        }
        if (message.heartbeat) {
          stream.write({ heartbeat: {} });
          last = message.heartbeat.last_upgrade ?? last;
        }
        if (message.reply) calls.get(message.reply.call_id)?.end(reasonOf(message.reply.error));
        if (message.farewell) stream.end();
      });
      stream.write({ challenge: { nonce: Buffer.alloc(32) } });
    },
    Answer(stream: AnswerStream) {
      const call = calls.get(String(stream.metadata.get(callKey)[0]));
      stream.on('error', () => undefined);
      stream.on('data', ({ message, error, end }) => {
        if (message) call?.answers.push(nameOf(shape.decodeResponse(message)));
        if (!error && !end) return;
        call?.end(reasonOf(error));
        stream.end();
      });
      if (call) void sendFrames(stream, call.frames(), call.signal).catch(() => undefined);
    },
  };
  const server = new Server();
  server.addService(linkService, handlers);
  const pair = [{ private_key: Buffer.from(key), cert_chain: Buffer.from(cert) }];
  const port = await new Promise<number>((resolve, reject) =>
    server.bindAsync('127.0.0.1:0', ServerCredentials.createSsl(null, pair), (error, bound) =>
      error ? reject(error) : resolve(bound),
    ),
  );
  atEnd(() => server.forceShutdown());
  return {
    address: `127.0.0.1:${port}`,
    joinToken: () => joinTokenText(newSecret(), authority.fingerprint, undefined),
    linked: () => hello,
    lastUpgrade: () => last,
    stage(signed, content, more) {
      const call_id = newId('call');
      const stopping = new AbortController();
      const answers: string[] = [];
      return new Promise((resolve) => {
        const end = (reason: string): void => {
          stopping.abort();
          resolve({ answers, end: reason });
        };
        function* frames(): Generator<Buffer> {
          yield shape?.frameRequest({ open: firstMessageFor(signed, more) }) ?? Buffer.alloc(0);
          for (let at = 0; at < content.length; at += pieceBytes)
            yield shape?.frameRequest({ chunk: content.subarray(at, at + pieceBytes) }) ?? Buffer.alloc(0);
          yield shape?.frameRequest({ commit: {} }) ?? Buffer.alloc(0);
        }
        calls.set(call_id, { answers, end, frames, signal: stopping.signal });
        control?.write({ call: { call_id, method: 'StageUpgrade', request_id: newId('request') } });
      });
    },
  };
}

interface Calling {
  answers: string[];
  end(reason: string): void;
  frames(): Generator<Buffer>;
  signal: AbortSignal;
}

function reasonOf(error: { code?: string; details?: string } | null | undefined): string {
  if (!error) return 'ok';
  const { code, details, message } = fromWire(error);
  const reason = typeof details.reason === 'string' ? details.reason : code;
  return reason === 'refused' ? message : reason;
}

/** Returns the name of the field that is set in an answer. */
function nameOf(response: unknown): string {
  const fields = Object.entries(response as Record<string, unknown>);
  return fields.find(([, value]) => typeof value === 'object' && value !== null)?.[0] ?? '';
}

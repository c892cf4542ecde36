// A Node client of a broker's gRPC API: one method per rpc of client.proto, with async iterables in and out.
import {
  type ChannelOptions,
  type ClientDuplexStream,
  type ClientReadableStream,
  type ClientWritableStream,
  credentials,
  status as grpcStatus,
  Metadata,
  makeGenericClientConstructor,
  type StatusObject,
} from '@grpc/grpc-js';
import type { StreamsClient, StreamsDefinition } from '../proto/types/farhand/client/v1/Streams.ts';
import { drained, linkServerName, parseDetails, streamsService } from './agent-rpcs.ts';
import { codes, isCode } from './errors.ts';
import { FarhandError } from './sdk/index.ts';

export { FarhandError };

export interface GrpcOptions {
  /** HOST:PORT of the broker's gRPC port. GET /info returns it as `grpc_address`. */
  address: string;
  /** The broker's certificate authority in PEM, from GET /ca.pem. */
  ca: string;
  apiKey: string;
}

export interface StreamOptions {
  signal?: AbortSignal;
  /** Idempotency key, only for exec. Another call with the same key within 24 h follows the same command. */
  idempotencyKey?: string;
}

type Rpc = {
  [K in keyof StreamsDefinition as string extends K ? never : K]: StreamsDefinition[K];
};
type In<M extends keyof Rpc> = Parameters<Rpc[M]['requestSerialize']>[0];
type Out<M extends keyof Rpc> = ReturnType<Rpc[M]['responseDeserialize']>;
type Requests<T> = AsyncIterable<T> | Iterable<T>;
type Follow<M extends keyof Rpc> = (request: In<M>, options?: StreamOptions) => AsyncGenerator<Out<M>>;
type Converse<M extends keyof Rpc> = (
  requests: Requests<In<M>>,
  options?: StreamOptions,
) => AsyncGenerator<Out<M>>;

/** The client's methods throw FarhandError with the error codes of REST. Ending an iteration early cancels the call. */
export interface Streams {
  exec: Converse<'Exec'>;
  attachSession: Converse<'AttachSession'>;
  followCommand: Follow<'FollowCommand'>;
  readFile: Follow<'ReadFile'>;
  watchFiles: Follow<'WatchFiles'>;
  events: Follow<'Events'>;
  writeFile(requests: Requests<In<'WriteFile'>>, options?: StreamOptions): Promise<Out<'WriteFile'>>;
  close(): void;
}

/**
 * HTTP/2 flow-control window of a call: the maximum number of bytes that wait unread. A smaller window would make
 * transfers slower; this one permits 55 MiB/s at a round trip of 50 ms.
 */
const windowBytes = 6 * 1024 * 1024;

const channelOptions: ChannelOptions = {
  'grpc.ssl_target_name_override': linkServerName,
  'grpc.default_authority': linkServerName,
  'grpc.use_local_subchannel_pool': 1,
  // Retries are off, because a repeated request could start a command twice.
  'grpc.enable_retries': 0,
  'grpc.service_config_disable_resolution': 1,
  'grpc-node.flow_control_window': windowBytes,
  'grpc.keepalive_time_ms': 30_000,
};

const ClientOf = makeGenericClientConstructor(streamsService, 'Streams');

/** Returns a client of one broker. The client connects at its first call. */
export function connect({ address, ca, apiKey }: GrpcOptions): Streams {
  // The cast is safe: StreamsClient is generated from the proto of this service.
  const client = new ClientOf(
    address,
    credentials.createSsl(Buffer.from(ca)),
    channelOptions,
  ) as unknown as StreamsClient;
  const headers = ({ idempotencyKey }: StreamOptions): Metadata => {
    const metadata = new Metadata();
    metadata.set('authorization', `Bearer ${apiKey}`);
    if (idempotencyKey !== undefined) metadata.set('idempotency-key', idempotencyKey);
    return metadata;
  };
  const converse = <M extends 'Exec' | 'AttachSession'>(
    open: (headers: Metadata) => ClientDuplexStream<In<M>, Out<M>>,
  ): Converse<M> =>
    async function* (requests, options = {}) {
      const stream = open(headers(options));
      yield* answers(stream, options, send(stream, requests));
    };
  const follow = <Request, Reply>(
    open: (request: Request, headers: Metadata) => ClientReadableStream<Reply>,
  ) =>
    async function* (request: Request, options: StreamOptions = {}): AsyncGenerator<Reply> {
      yield* answers(open(request, headers(options)), options);
    };
  return {
    exec: converse<'Exec'>((head) => client.exec(head)),
    attachSession: converse<'AttachSession'>((head) => client.attachSession(head)),
    followCommand: follow((request: In<'FollowCommand'>, head) => client.followCommand(request, head)),
    readFile: follow((request: In<'ReadFile'>, head) => client.readFile(request, head)),
    watchFiles: follow((request: In<'WatchFiles'>, head) => client.watchFiles(request, head)),
    events: follow((request: In<'Events'>, head) => client.events(request, head)),
    async writeFile(requests, options = {}) {
      const answer = Promise.withResolvers<Out<'WriteFile'>>();
      const stream = client.writeFile(headers(options), (error, response) => {
        if (response) answer.resolve(response);
        else
          answer.reject(error ? errorOf(error) : new Error('the broker ended the upload without a response'));
      });
      const sending = send(stream, requests);
      const release = givingUp(stream, options.signal);
      try {
        return await answer.promise;
      } catch (error) {
        throw sending.failure() ?? error;
      } finally {
        release();
        sending.stop();
      }
    },
    close: () => client.close(),
  };
}

/** Starts to send the requests. `stop` ends the sending. `failure` returns the error that `requests` threw. */
function send<T>(stream: ClientWritableStream<T>, requests: Requests<T>) {
  const stop = new AbortController();
  let failure: unknown;
  sendAll(stream, requests, stop.signal).catch((error: unknown) => {
    if (stop.signal.aborted) return;
    failure = error;
    stream.cancel();
  });
  return { stop: () => stop.abort(), failure: () => failure };
}

async function sendAll<T>(
  stream: ClientWritableStream<T>,
  requests: Requests<T>,
  signal: AbortSignal,
): Promise<void> {
  for await (const request of requests) {
    signal.throwIfAborted();
    if (!stream.write(request)) await drained(stream, signal);
  }
  stream.end();
}

/** Cancels the call when the signal fires. Returns a function that removes the signal's listener. */
function givingUp(stream: { cancel(): void }, signal: AbortSignal | undefined): () => void {
  const cancel = (): void => stream.cancel();
  signal?.addEventListener('abort', cancel, { once: true });
  if (signal?.aborted) cancel();
  return () => signal?.removeEventListener('abort', cancel);
}

/**
 * Yields the messages of a stream. Throws unless the status is OK, because a broken stream may end like a complete one.
 */
async function* answers<T>(
  stream: ClientReadableStream<T>,
  { signal }: StreamOptions,
  sending?: ReturnType<typeof send>,
): AsyncGenerator<T> {
  const release = givingUp(stream, signal);
  const ended = new Promise<StatusObject>((resolve) => stream.once('status', resolve));
  // Without this listener an "error" event would end the process. The status reports the same error.
  stream.on('error', () => undefined);
  try {
    // The cast is safe: in grpc-js every message has type `any`, but the service decodes only messages of type T.
    for await (const message of stream as AsyncIterable<T>) yield message;
  } catch {
    // Ignored: the status, which is checked below, has the error code and the details.
  } finally {
    release();
    sending?.stop();
    stream.cancel();
  }
  const status = await ended;
  if (sending?.failure() !== undefined) throw sending.failure();
  if (status.code !== grpcStatus.OK) throw errorOf(status);
}

const plainCodes: Partial<Record<grpcStatus, keyof typeof codes>> = {
  [grpcStatus.UNAUTHENTICATED]: 'unauthorized',
  [grpcStatus.PERMISSION_DENIED]: 'forbidden',
  [grpcStatus.UNIMPLEMENTED]: 'not_supported',
  [grpcStatus.RESOURCE_EXHAUSTED]: 'payload_too_large',
  [grpcStatus.INTERNAL]: 'internal_error',
};

function errorOf({ code: status, details: message, metadata }: StatusObject): FarhandError {
  const text = (name: string): string => String(metadata.get(name)[0] ?? '');
  const given = text('farhand-code');
  // An error without a Farhand code comes from gRPC itself, such as a lost connection or a cancelled call.
  const code = isCode(given) ? given : (plainCodes[status] ?? 'unavailable');
  const details = isCode(given) ? parseDetails(text('farhand-details')) : { grpc_status: grpcStatus[status] };
  return new FarhandError(codes[code], text('farhand-request-id'), { code, message, details });
}

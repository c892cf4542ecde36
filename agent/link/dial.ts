// Makes one attempt to connect to the broker, by gRPC clients that trust only the broker's CA certificate.
import {
  type ChannelOptions,
  connectivityState,
  credentials,
  status as grpcStatus,
  Metadata,
  makeGenericClientConstructor,
  type ServiceError,
} from '@grpc/grpc-js';
import type { EnrollRequest } from '../../proto/types/farhand/link/v1/EnrollRequest.ts';
import type { EnrollResponse__Output } from '../../proto/types/farhand/link/v1/EnrollResponse.ts';
import type { LinkClient } from '../../proto/types/farhand/link/v1/Link.ts';
import { firstBytes } from '../../shared/adapt-http2-windows.ts';
import { callKey, linkServerName, linkService } from '../../shared/agent-rpcs.ts';
import { clockFault } from '../../shared/certificate-clock-error.ts';
import { now } from '../../shared/clock.ts';
import { AppError, StartError } from '../../shared/errors.ts';
import { clean } from '../../shared/sanitize-text.ts';

export type ControlStream = ReturnType<LinkClient['Connect']>;
export type AnswerStream = ReturnType<LinkClient['Answer']>;

const enrolMs = 10_000;
/**
 * Milliseconds to wait for the second connection, the one for long answers. If it is not ready by then, the answer uses
 * the first connection. The broker waits for an answer stream for longer than this time.
 */
const connectMs = 2_000;

const options: ChannelOptions = {
  'grpc.ssl_target_name_override': linkServerName,
  'grpc.default_authority': linkServerName,
  // Each client gets connections of its own. In the global pool of grpc-js, clients with the same address, options and
  // credentials share a connection, and also the pause before it reconnects.
  'grpc.use_local_subchannel_pool': 1,
  // Prevents grpc-js from repeating calls by itself. After a lost connection, keepLinked() dials again.
  'grpc.enable_retries': 0,
  // grpc-js stores up to 1 MiB of the data that each call sends, so that it can send the data again. It does so even if
  // retries are off, unless this size is 0.
  'grpc.per_rpc_retry_buffer_size': 0,
  'grpc.service_config_disable_resolution': 1,
  'grpc-node.flow_control_window': firstBytes,
  'grpc.max_receive_message_length': 2 * 1024 * 1024,
  'grpc.max_send_message_length': 2 * 1024 * 1024,
  // The broker is dialed directly, even if the environment sets an HTTP proxy.
  'grpc.enable_http_proxy': 0,
};
/**
 * Options of the connection for long answers. Pings show whether the connection is broken; the control stream's
 * connection has heartbeats instead.
 */
const keepalive: ChannelOptions = {
  'grpc.keepalive_time_ms': 20_000,
  'grpc.keepalive_timeout_ms': 10_000,
  'grpc.keepalive_permit_without_calls': 1,
};
const LinkClientOf = makeGenericClientConstructor(linkService, 'Link');

/** Connections to one broker. `broker` is HOST:PORT, `ca` the PEM of the broker's CA certificate. */
export class Dial {
  readonly #first: LinkClient;
  /**
   * A separate connection for long answers, so that a key press does not wait behind megabytes of a download.
   */
  readonly #second: LinkClient;

  constructor(broker: string, ca: string) {
    this.#first = clientOf(broker, ca);
    this.#second = clientOf(broker, ca, keepalive);
  }

  connect(): ControlStream {
    return this.#first.Connect();
  }

  /**
   * Opens the stream that answers one call. It uses the connection of the control stream if `quick` is set, otherwise
   * the second connection.
   */
  answer(callId: string, quick: boolean): AnswerStream {
    const metadata = new Metadata();
    metadata.set(callKey, callId);
    return (quick ? this.#first : this.#second).Answer(metadata);
  }

  /** True if the connection for long answers is ready. Connects it if needed and waits up to 2 s. */
  async isSecondReady(): Promise<boolean> {
    const channel = this.#second.getChannel();
    const deadline = now() + connectMs;
    // waitForReady of grpc-js is not used, because it makes a closed client dial again.
    for (;;) {
      const state = channel.getConnectivityState(true);
      if (state === connectivityState.READY) return true;
      // In the states TRANSIENT_FAILURE and SHUTDOWN, the connection has failed or is closed. grpc-js reconnects a
      // failed one after a pause, which is too long to wait here.
      if (state !== connectivityState.IDLE && state !== connectivityState.CONNECTING) return false;
      const { promise, resolve } = Promise.withResolvers<boolean>();
      channel.watchConnectivityState(state, deadline, (error) => resolve(!error));
      if (!(await promise)) return false;
    }
  }

  close(): void {
    this.#first.close();
    this.#second.close();
  }
}

/**
 * Registers this machine with a join token. Throws StartError if the broker refuses the machine, and AppError if a
 * later attempt may succeed.
 */
export function enrollWith(
  broker: string,
  ca: string,
  request: EnrollRequest,
): Promise<EnrollResponse__Output> {
  const client = clientOf(broker, ca);
  return new Promise<EnrollResponse__Output>((resolve, reject) => {
    client.Enroll(request, { deadline: now() + enrolMs }, (error, response) => {
      if (response) resolve(response);
      else reject(enrolError(error));
    });
  }).finally(() => client.close());
}

function clientOf(broker: string, ca: string, more: ChannelOptions = {}): LinkClient {
  // The cast is safe: the type LinkClient and the class LinkClientOf come from the same proto file.
  return new LinkClientOf(broker, credentials.createSsl(Buffer.from(ca)), {
    ...options,
    ...more,
  }) as unknown as LinkClient;
}

/** Makes a text from the broker safe to print: sanitized, and cut to 200 characters. */
export const brokerText = (text: string): string => clean(text.slice(0, 200));

const final = new Set<number>([grpcStatus.UNAUTHENTICATED, grpcStatus.INVALID_ARGUMENT]);

function enrolError(error: ServiceError | null): Error {
  if (error && final.has(error.code))
    return new StartError(`the broker refused this machine: ${brokerText(error.details)}`);
  const why = error?.details ?? 'the broker did not answer';
  return new AppError('unavailable', `joining the broker failed: ${clockFault(why) ?? brokerText(why)}`);
}

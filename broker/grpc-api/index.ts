// The gRPC service farhand.client.v1.Streams for clients, and gRPC health, on the port that agents connect
// to.
import type { Metadata, Server, sendUnaryData, UntypedServiceImplementation } from '@grpc/grpc-js';
import { HealthImplementation } from 'grpc-health-check';
import { orEncoded, streamsService } from '../../shared/agent-rpcs.ts';
import type { Peers } from '../cluster/peers/route-to-owner.ts';
import type { Client } from '../request-checks/authenticate.ts';
import { publicError } from '../request-checks/public-error.ts';
import { sessionRpcs } from './attach-session.ts';
import { commandRpcs } from './commands.ts';
import { eventRpcs, fileRpcs } from './files-and-events.ts';
import {
  Call,
  type Method,
  type Rpc,
  refusalOf,
  type Stream,
  type StreamsServices,
  trailersOf,
} from './incoming-call.ts';

/** How the service treats the calls of one port. */
interface CallsPort {
  /** Called with the client's address for each call that has a valid key. */
  markAuthenticated?(peer: string): void;
  /** Finds the client of a call that another broker forwarded; only on the peer port. */
  forwardedClient?(headers: Metadata): Promise<Client>;
  /**
   * Used instead of the service's `peers`. Set only for the peer port. These Peers refuse calls about machines of other
   * brokers, so that a call which another broker has forwarded is not forwarded again.
   */
  peers?: Peers;
}

const served = ['', 'farhand.client.v1.Streams'];

/**
 * The definition of the service. Its answers may be bytes, because a forwarded answer is encoded by the other
 * broker.
 */
const service = Object.fromEntries(
  Object.entries(streamsService).map(([name, method]) => [
    name,
    { ...method, responseSerialize: orEncoded(method.responseSerialize) },
  ]),
);

export class StreamsService {
  readonly #services: StreamsServices;
  readonly #health = new HealthImplementation(Object.fromEntries(served.map((name) => [name, 'SERVING'])));
  readonly #open = new Set<Call>();
  #stopped = false;

  constructor(services: StreamsServices) {
    this.#services = services;
  }

  /** Adds the service to a server that does not listen yet. */
  addTo(server: Server, port: CallsPort): void {
    const services = this.#services;
    const rpcs: Record<Method, Rpc> = {
      ...commandRpcs(services),
      ...fileRpcs(services),
      ...eventRpcs(services),
      ...sessionRpcs(services),
    };
    const handlers: UntypedServiceImplementation = {};
    for (const [name, rpc] of Object.entries(rpcs)) {
      handlers[name] = (stream: Stream, reply?: sendUnaryData<unknown>): void =>
        void this.#serve(rpc, stream, port, reply);
    }
    server.addService(service, handlers);
    this.#health.addToServer(server);
  }

  /** Reports NOT_SERVING to health checks, and ends every call. */
  stop(): void {
    this.#stopped = true;
    for (const name of served) this.#health.setStatus(name, 'NOT_SERVING');
    for (const call of this.#open) call.stop();
  }

  /**
   * Serves one call until its end. `reply` is set for an rpc whose response is not a stream. Never rejects.
   */
  async #serve(rpc: Rpc, stream: Stream, port: CallsPort, reply?: sendUnaryData<unknown>): Promise<void> {
    const { log } = this.#services;
    const peers = port.peers ?? this.#services.peers;
    const call = new Call(stream, this.#services);
    const trailers = trailersOf(call.requestId);
    this.#open.add(call);
    try {
      await call.authenticate(port.forwardedClient);
      port.markAuthenticated?.(stream.getPeer());
      if (this.#stopped) call.stop();
      call.gone.signal.throwIfAborted();
      const elsewhere = peers && (await call.elsewhere(rpc, peers));
      const response = await (elsewhere ? call.forward(rpc, elsewhere, !reply) : call.perform(rpc));
      if (reply) reply(null, response, trailers);
      else stream.end(trailers);
    } catch (error) {
      const about = { request_id: call.requestId, path: stream.getPath() };
      const refusal = refusalOf(publicError(error, about, log), call.requestId);
      if (reply) reply(refusal);
      // An error event ends both sides; destroy() would leave the client's side open.
      else stream.emit('error', refusal);
    } finally {
      this.#open.delete(call);
      call.end();
    }
  }
}

// The gRPC service farhand.client.v1.Streams for clients, and gRPC health, on the port that agents connect
// to.
import type { Server, sendUnaryData, UntypedServiceImplementation } from '@grpc/grpc-js';
import { HealthImplementation } from 'grpc-health-check';
import { streamsService } from '../../shared/agent-rpcs.ts';
import { publicError } from '../admission/public-error.ts';
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
import { sessionRpcs } from './sessions.ts';

const served = ['', 'farhand.client.v1.Streams'];

export class StreamsService {
  readonly #services: StreamsServices;
  readonly #health = new HealthImplementation(Object.fromEntries(served.map((name) => [name, 'SERVING'])));
  readonly #open = new Set<Call>();
  #stopped = false;

  constructor(services: StreamsServices) {
    this.#services = services;
  }

  /**
   * Adds the service to a server that does not listen yet. `markAuthenticated` is called with the peer of
   * each valid call.
   */
  addTo(server: Server, markAuthenticated: (peer: string) => void): void {
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
        void this.#serve(rpc, stream, markAuthenticated, reply);
    }
    server.addService(streamsService, handlers);
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
  async #serve(
    rpc: Rpc,
    stream: Stream,
    markAuthenticated: (peer: string) => void,
    reply?: sendUnaryData<unknown>,
  ): Promise<void> {
    const { proxies, log } = this.#services;
    const call = new Call(stream, proxies);
    const trailers = trailersOf(call.requestId);
    this.#open.add(call);
    try {
      await call.authenticate(this.#services);
      markAuthenticated(stream.getPeer());
      if (this.#stopped) call.stop();
      call.gone.signal.throwIfAborted();
      const response = await call.perform(rpc);
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

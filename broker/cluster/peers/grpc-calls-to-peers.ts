// Makes gRPC calls to the peer ports of other brokers, over one connection to each broker.

import { Client, type ClientDuplexStream, credentials, Metadata, type MethodDefinition } from '@grpc/grpc-js';
import { type PeerLeaf, peerName } from '../../ca-and-broker-certificates.ts';
import { messageBytes } from '../../link/control-stream.ts';
import { leaseMs } from '../cluster-tables.ts';
import type { Forwarded, PeerClient } from './forward-http-to-peer.ts';
import { clientHeader, describeClient } from './forwarded-client-header.ts';
import type { Owners, Peer } from './owner-interfaces.ts';

/** A call to another broker. Its answers are encoded messages, because this broker does not read them. */
export type PeerCall<Request> = ClientDuplexStream<Request, Buffer>;

/**
 * Maximum number of unread bytes of a call. It can be small, because the network between brokers has a short latency.
 */
const windowBytes = 2 * 1024 * 1024;

const options = {
  'grpc.ssl_target_name_override': peerName,
  'grpc.default_authority': peerName,
  'grpc.use_local_subchannel_pool': 1,
  // With retries disabled, grpc-js never repeats a call, so no request can start a command twice.
  'grpc.enable_retries': 0,
  'grpc.service_config_disable_resolution': 1,
  // Other brokers are called directly, even if the environment sets an HTTP proxy.
  'grpc.enable_http_proxy': 0,
  'grpc.enable_channelz': 0,
  'grpc-node.flow_control_window': windowBytes,
  'grpc.max_receive_message_length': messageBytes,
  'grpc.max_send_message_length': messageBytes,
  // A broker that cannot be reached is noticed within 15 s.
  'grpc.keepalive_time_ms': 4_000,
  // A timeout shorter than a lease would end calls to a frozen broker while that broker still owns its machines.
  'grpc.keepalive_timeout_ms': leaseMs,
};

/** Header of a call that asks another broker to write files. It contains the id of the machine that gets the files. */
export const machineHeader = 'farhand-machine';

/** Headers of the client's call that are passed on, because the owner of the machine reads them. */
const passed = ['idempotency-key', machineHeader];

/** The clients with which this broker calls other brokers: one for HTTP requests and WebSockets, one for gRPC calls. */
export interface Clients {
  http: PeerClient;
  grpc: PeerCalls;
}

export class PeerCalls {
  readonly #clients = new Map<string, Client>();
  readonly #owners: Pick<Owners, 'hasEnded'>;
  /** Calls that have not ended. The value is the id of the broker that answers the call. */
  readonly #calls = new Map<Pick<PeerCall<never>, 'cancel'>, string>();
  #leaf: PeerLeaf;

  constructor(leaf: PeerLeaf, owners: Pick<Owners, 'hasEnded'>) {
    this.#leaf = leaf;
    this.#owners = owners;
  }

  /** Ends the calls to brokers whose lease is over. */
  endLost(): void {
    for (const [call, brokerId] of this.#calls) if (this.#owners.hasEnded(brokerId)) call.cancel();
  }

  /** Uses a newer certificate for new connections. Calls over the old connections continue. */
  renew(leaf: PeerLeaf): void {
    this.#leaf = leaf;
    this.close();
  }

  /** Closes the connections once their calls have ended. */
  close(): void {
    for (const client of this.#clients.values()) client.close();
    this.#clients.clear();
  }

  /** Starts a unary or streaming call. On the wire, every call is a stream of messages in both directions. */
  call<Request>(
    peer: Peer,
    { path, requestSerialize }: Pick<MethodDefinition<Request, unknown>, 'path' | 'requestSerialize'>,
    headers: Metadata,
    { client, requestId }: Forwarded,
  ): PeerCall<Request> {
    const own = new Metadata();
    for (const name of passed) for (const value of headers.get(name)) own.add(name, value);
    own.set('x-request-id', requestId);
    if (client) own.set(clientHeader, describeClient(client));
    const call = this.#clientOf(peer).makeBidiStreamRequest(path, requestSerialize, (bytes) => bytes, own);
    this.#calls.set(call, peer.brokerId);
    call.once('status', () => this.#calls.delete(call));
    return call;
  }

  #clientOf({ url }: Peer): Client {
    const known = this.#clients.get(url);
    if (known) return known;
    const { ca, key, cert } = this.#leaf;
    const [root, own, chain] = [ca, key, cert].map((pem) => Buffer.from(pem));
    const made = new Client(new URL(url).host, credentials.createSsl(root, own, chain), options);
    this.#clients.set(url, made);
    return made;
  }
}

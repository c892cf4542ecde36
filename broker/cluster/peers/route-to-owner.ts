// Finds the broker that answers a request: the owner of the machine that the request is about, otherwise this broker.
import type { IncomingMessage, ServerResponse } from 'node:http';
import type { Duplex } from 'node:stream';
import type { Metadata, MethodDefinition } from '@grpc/grpc-js';
import type { IdNoun, MachineId } from '../../../shared/api/shared-schemas.ts';
import { AppError } from '../../../shared/errors.ts';
import type { Lookups } from '../../request-checks/authorize-and-perform.ts';
import type { FoundId } from '../../request-checks/parse-api-request.ts';
import type { State } from '../../state/index.ts';
import type { Forwarded } from './forward-http-to-peer.ts';
import type { Clients, PeerCall } from './grpc-calls-to-peers.ts';
import type { Owners, Peer } from './owner-interfaces.ts';

export type { Forwarded, PeerCall };

interface Services {
  owners: Pick<Owners, 'ownerElsewhere' | 'newOwner' | 'loaded' | 'directoryId' | 'withDirectory'>;
  lookups: Lookups;
  state: State;
}

/**
 * Kinds of objects that belong to one machine. The owner of that machine answers requests about them. Batches are not
 * among them, because a batch can have many machines.
 */
const withMachine: readonly IdNoun[] = ['command', 'session', 'schedule', 'run'];

/** The machine that a request is about, and the data that decides which broker answers the request. */
export interface RequestSubject {
  machine: MachineId;
  /**
   * Id of the data directory that has the output files of an ended command. The broker with this directory answers the
   * request, if that broker runs.
   */
  directory?: string | undefined;
  /**
   * The machine's owner, read again from the database if the machine had no link when all owners were last read.
   * Undefined if the owner was not read again, or is not another living broker.
   */
  newOwner?: Peer | undefined;
}

/** Functions that send a request to another broker, which answers it. */
export interface Elsewhere {
  forward(request: IncomingMessage, response: ServerResponse, forwarded: Forwarded): Promise<void>;
  upgrade(request: IncomingMessage, socket: Duplex, head: Buffer, forwarded: Forwarded): Promise<boolean>;
  /** Starts a gRPC call to the other broker. `headers` are those of the client's call. */
  call<Request>(method: MethodOf<Request>, headers: Metadata, forwarded: Forwarded): PeerCall<Request>;
}

type MethodOf<Request> = Pick<MethodDefinition<Request, unknown>, 'path' | 'requestSerialize'>;

export class Peers {
  readonly #services: Services;
  readonly #clients: Clients | undefined;

  /** If `clients` is undefined, requests about machines of other brokers are refused. */
  constructor(services: Services, clients?: Clients) {
    this.#services = services;
    this.#clients = clients;
  }

  /**
   * Returns an object of this class that refuses requests about machines of other brokers. The peer port uses this
   * object, so that a forwarded request is never forwarded again.
   */
  get atPeerPort(): Peers {
    return new Peers(this.#services);
  }

  /** Returns the machine that a request is about; undefined if the request's ids belong to no machine. */
  async subjectOf(ids: readonly FoundId[]): Promise<RequestSubject | undefined> {
    const subject = await this.#findSubject(ids);
    if (!subject) return undefined;
    const { owners } = this.#services;
    // If this broker has just become the owner, the machine's open work may still be loading. Open sessions would then
    // seem to have ended.
    await owners.loaded(subject.machine);
    return { ...subject, newOwner: await owners.newOwner(subject.machine) };
  }

  async #findSubject(ids: readonly FoundId[]): Promise<RequestSubject | undefined> {
    for (const { noun, id, listed, filters } of ids) {
      if (listed || filters) continue;
      // The cast is safe: if there is no machine with this id, no broker owns it, and this broker refuses the
      // request.
      if (noun === 'machine') return { machine: id as MachineId };
      if (!withMachine.includes(noun)) continue;
      const subject = (await this.#find(noun, id)) ?? (await this.#findNew(noun, id));
      if (subject) return subject;
    }
    return undefined;
  }

  async #find(noun: IdNoun, id: string): Promise<RequestSubject | undefined> {
    const { lookups, state } = this.#services;
    const { present, stored } = lookups[noun];
    const found = present?.(id, state, false) ?? (await stored?.(id, false));
    const [machine] = found?.machines ?? [];
    return machine && { machine, directory: found?.directory };
  }

  /** Reads the changes of other brokers and finds the id again: another broker may just have created the object. */
  async #findNew(noun: IdNoun, id: string): Promise<RequestSubject | undefined> {
    await this.#services.state.refresh();
    return this.#find(noun, id);
  }

  /**
   * The only registered machine; undefined if there are none or several. A request without a machine id, which some
   * routes permit, is about this machine.
   */
  get onlyMachine(): RequestSubject | undefined {
    const { machines } = this.#services.state;
    const [only] = machines.size === 1 ? machines.keys() : [];
    // The cast is safe: the keys are the ids of the machines.
    return only === undefined ? undefined : { machine: only as MachineId };
  }

  /**
   * Reads the changes of other brokers, for a request that any broker can answer. Never rejects: if the database does
   * not answer, the request is answered from the data that was read before.
   */
  async refresh(): Promise<void> {
    await this.#services.state.refresh().catch(() => {});
  }

  /** True if a session is open at this broker. */
  hasSession(id: string): boolean {
    const { lookups, state } = this.#services;
    const [machine] = lookups.session.present?.(id, state, false)?.machines ?? [];
    return machine !== undefined && !this.elsewhere({ machine });
  }

  /** Returns the functions that send the request to another broker; undefined if this broker must answer. */
  elsewhere({ machine, directory, newOwner }: RequestSubject): Elsewhere | undefined {
    const { owners } = this.#services;
    if (directory === owners.directoryId) return undefined;
    const withFiles = directory === undefined ? undefined : owners.withDirectory(directory);
    // If the broker with the output files does not run, the owner of the machine answers.
    const peer = withFiles ?? newOwner ?? owners.ownerElsewhere(machine);
    if (!peer) return undefined;
    if (!this.#clients) return missed(peer, machine);
    const { http, grpc } = this.#clients;
    return {
      forward: (...request) => http.forward(peer, ...request),
      upgrade: (...request) => http.upgrade(peer, ...request),
      call: (...call) => grpc.call(peer, ...call),
    };
  }
}

/**
 * Returns functions that refuse a request which another broker has forwarded to this one. They are used if the machine
 * has got another owner meanwhile, because a request is never forwarded twice.
 */
function missed({ brokerId }: Peer, machine_id: MachineId): Elsewhere {
  const message = 'another broker has become responsible for this machine: try again';
  const details = { machine_id, broker_id: brokerId, retry_after: 1 };
  const refuse = (): never => {
    throw new AppError('unavailable', message, details);
  };
  return { forward: async () => refuse(), upgrade: async () => refuse(), call: refuse };
}

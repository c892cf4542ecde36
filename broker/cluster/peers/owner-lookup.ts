// Which broker is responsible for a machine, and what handlers ask of that broker.
import type { AgentStub } from '../../../shared/agent-rpcs.ts';
import type { Caller } from '../../../shared/api/route-table.ts';

/** Another living broker of the same database. */
export interface Peer {
  brokerId: string;
  /** URL of its peer port. */
  url: string;
}

export interface Owners {
  /** The living broker that owns the machine, if it is another one. */
  ownerElsewhere(machineId: string): Peer | undefined;
  /** The other living brokers. */
  peers(): readonly Peer[];
  /** True once the lease of a broker is over, by the clock of the database. */
  hasEnded(brokerId: string): boolean;
  /** Calls `watcher` after owners or living brokers have changed. Call the returned function to stop. */
  watch(watcher: () => void): () => void;
  /** Stores the URL under which the other brokers find this one's peer port. Call once the port listens. */
  advertise(url: string): Promise<void>;
}

/** The calls of an agent that write files. */
export type FileWriter = Pick<AgentStub, 'writeFile' | 'writeArchive'>;

/** What a request needs of the owners of its machines, if it is about machines of several brokers. */
export interface OtherBrokers extends Pick<Owners, 'ownerElsewhere'> {
  /** Sends a GET request of the caller to another broker. Resolves with the data of the answer. Throws unavailable. */
  get(peer: Peer, path: string, caller: Caller): Promise<unknown>;
  /** Follows a stream of another broker to its end. Throws unavailable. */
  events(peer: Peer, path: string, caller: Caller): AsyncGenerator<{ event: string; data: unknown }>;
  /** Writes files on a machine of another broker; undefined for all other machines. */
  writerOn(machineId: string, caller: Caller): FileWriter | undefined;
}

// Interfaces by which handlers find the broker that owns a machine, and send requests to it.
import type { AgentStub } from '../../../shared/agent-rpcs.ts';
import type { Caller } from '../../../shared/api/route-table.ts';

/** A living broker of the same database. */
export interface Peer {
  brokerId: string;
  /** URL of the broker's peer port. */
  url: string;
}

export interface Owners {
  /** Returns the living broker that owns the machine, if it is not this broker. */
  ownerElsewhere(machineId: string): Peer | undefined;
  /**
   * Reads the owner of a machine from the database, but only if this broker knows of no link to the machine. Returns
   * the owner if it is a living broker other than this one; otherwise undefined.
   */
  newOwner(machineId: string): Promise<Peer | undefined>;
  /** Id of this broker's data directory. */
  readonly directoryId: string;
  /** Returns the other broker whose data directory has this id; undefined if that broker does not run. */
  withDirectory(directoryId: string): Peer | undefined;
  /**
   * If this broker owns the machine, waits until the machine's open work is loaded. Throws unavailable if the work
   * cannot be loaded.
   */
  loaded(machineId: string): Promise<void>;
  /** True once the lease of a broker is over, by the clock of the database. */
  hasEnded(brokerId: string): boolean;
  /** Calls `watcher` after owners or living brokers have changed. Call the returned function to stop. */
  watch(watcher: () => void): () => void;
  /** Stores the URL at which other brokers reach the peer port of this broker. Call this once the port listens. */
  advertise(url: string): Promise<void>;
}

export type FileWriter = Pick<AgentStub, 'writeFile' | 'writeArchive'>;

/** Calls to other brokers, for requests about machines that other brokers own. */
export interface OtherBrokers extends Pick<Owners, 'ownerElsewhere'> {
  /**
   * Sends a GET request of the caller to another broker. Resolves with the data of the answer. Throws unavailable if
   * the broker does not answer with status 200.
   */
  get(peer: Peer, path: string, caller: Caller): Promise<unknown>;
  /** Follows a stream of another broker to its end. Throws unavailable if the stream cannot begin or breaks. */
  events(peer: Peer, path: string, caller: Caller): AsyncGenerator<{ event: string; data: unknown }>;
  /**
   * Returns an object that writes files on a machine through the broker that owns the machine. Returns undefined if no
   * other broker owns it.
   */
  writerOn(machineId: string, caller: Caller): FileWriter | undefined;
}

// Which broker is responsible for a machine.

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
  /** Stores the URL under which the other brokers find this one's peer port. Call once the port listens. */
  advertise(url: string): Promise<void>;
}

// The interface by which a broker finds the owner of a machine: the broker that runs all work of the machine.

/** Another living broker of the same database. */
export interface Peer {
  brokerId: string;
  /** URL of the peer port of that broker. */
  url: string;
}

export interface Owners {
  /** Returns the living broker that owns the machine; undefined if this broker does, or no broker. */
  ownerElsewhere(machineId: string): Peer | undefined;
  /** Returns the other living brokers. */
  peers(): readonly Peer[];
  /**
   * Stores the URL at which other brokers connect to the peer port of this one. Called once the port listens.
   */
  advertise(url: string): Promise<void>;
}

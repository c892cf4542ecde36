// What all parts of the fleet bench use: the broker, the agents, a client and the settings.
import type { Farhand } from '../../../shared/sdk/index.ts';
import type { BrokerProcess } from './broker-process.ts';
import type { FleetOfAgents } from './fleet-of-agents.ts';
import type { Figures } from './print-figures.ts';

export interface FleetSettings {
  scale: number;
  /** Seconds for which each HTTP load test sends requests. */
  seconds: number;
  /** Seconds over which the CPU at rest is measured. */
  restSeconds: number;
}

export interface Fleet {
  broker: BrokerProcess;
  agents: FleetOfAgents;
  client: Farhand;
  figures: Figures;
  settings: FleetSettings;
  folder: string;
  /** Private memory of the broker before the first agent joined. */
  baseMiB: number;
}

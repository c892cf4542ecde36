// Creates what webhooks and alert channels share: stored deliveries, encrypted secrets, and requests to allowed
// addresses.
import { StartError } from '../../shared/errors.ts';
import type { History } from '../history/history-database.ts';
import { AddressGuard, type Network, networkOf } from './address-guard.ts';
import { Sender } from './attempt-delivery.ts';
import { DeliveryStore } from './delivery-store.ts';
import { type ResolveName, resolveName } from './resolve-host-name.ts';
import { SecretVault } from './secret-encryption.ts';

export interface DeliverySettings {
  /** Directory of the key file for the secrets. */
  directory: string;
  /** Networks that may be called besides the public internet. */
  allow: readonly string[];
  keepMs: number;
  /** Replaces the hosts file and the name servers in tests. */
  resolve: ResolveName | undefined;
}

export type Deliveries = Awaited<ReturnType<typeof createDeliveries>>;

/** Throws StartError, for example for a damaged key file or an invalid network in `allow`. */
export async function createDeliveries(history: History, settings: DeliverySettings) {
  const { directory, allow, keepMs, resolve } = settings;
  const vault = await SecretVault.open(directory);
  const store = await DeliveryStore.open(history, keepMs);
  const guard = new AddressGuard(allow.map(assertNetwork), resolve ?? resolveName);
  return { vault, store, guard, sender: new Sender(guard) };
}

function assertNetwork(text: string): Network {
  const network = networkOf(text);
  if (network) return network;
  throw new StartError(
    `--webhook-allow ${text}: must be a whole IP address such as 10.0.0.1, or a network such as 10.0.0.0/8 or fd00::/8`,
  );
}

// Collects the inventory of this machine, all parts at the same time.
// If a part cannot be read, the reason is sent instead.
import type { GetInventoryResponse } from '../../proto/types/farhand/agent/v1/GetInventoryResponse.ts';
import type { InventoryGap } from '../../proto/types/farhand/agent/v1/InventoryGap.ts';
import { errnoOf } from '../../shared/errors.ts';
import { readContainers, readFailedUnits } from './failed-units-and-containers.ts';
import { findPackageManager } from './packages-and-updates.ts';
import { readPorts } from './ports.ts';
import { PartFailed } from './run-program.ts';
import { readDisks, readInterfaces, readSystem } from './system.ts';

const mostItems = {
  disks: 256,
  interfaces: 256,
  packages: 20_000,
  updates: 5_000,
  ports: 2_000,
  failed_units: 500,
  containers: 1_000,
};
type List = keyof typeof mostItems;

/** Maximum number of characters in a field. Longer texts are cut. */
const longestText = 256;

export async function collect(signal: AbortSignal): Promise<GetInventoryResponse> {
  const incomplete: InventoryGap[] = [];
  const manager = await findPackageManager();
  if (!manager) incomplete.push({ part: 'packages', reason: 'no known package manager is installed' });
  const part = <T extends object>(name: List, read: Promise<T[]>): Promise<T[]> =>
    limited(name, read, incomplete);
  const [system, disks, interfaces, packages, updates, ports, failed_units, containers] = await Promise.all([
    readSystem(signal),
    part('disks', readDisks()),
    part('interfaces', readInterfaces()),
    part('packages', manager?.installed(signal) ?? Promise.resolve([])),
    part('updates', manager?.updates(signal) ?? Promise.resolve([])),
    part('ports', readPorts()),
    part('failed_units', readFailedUnits(signal)),
    part('containers', readContainers()),
  ]);
  signal.throwIfAborted();
  const named = shortened({ ...system, package_format: manager?.format ?? '' });
  return { system: named, disks, interfaces, packages, updates, ports, failed_units, containers, incomplete };
}

/**
 * Reads one part of the inventory, and limits the number of its items and the length of their texts. If the part cannot
 * be read, it is empty, and `incomplete` gets the reason.
 */
async function limited<T extends object>(
  part: List,
  read: Promise<T[]>,
  incomplete: InventoryGap[],
): Promise<T[]> {
  try {
    const items = await read;
    const most = mostItems[part];
    if (items.length > most)
      incomplete.push({ part, reason: `only the first ${most} of ${items.length} are listed` });
    return items.slice(0, most).map(shortened);
  } catch (error) {
    const reason =
      error instanceof PartFailed ? error.message : `cannot be read (${errnoOf(error) ?? 'invalid'})`;
    incomplete.push({ part, reason: reason.slice(0, longestText) });
    return [];
  }
}

const clean = (text: string): string =>
  text
    .replaceAll(/\p{Cc}/gu, '')
    .slice(0, longestText)
    .toWellFormed();

/** Cuts the texts of an object, and removes their control characters. */
function shortened<T extends object>(item: T): T {
  const fields = Object.entries(item).map(([name, value]: [string, unknown]) => [
    name,
    typeof value === 'string' ? clean(value) : value,
  ]);
  // The cast is safe: each field keeps its type.
  return Object.fromEntries(fields) as T;
}

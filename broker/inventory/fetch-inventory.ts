// Requests the inventory of a machine, joins the parts of the answer and checks them.
import * as z from 'zod';
import type { GetInventoryResponse__Output } from '../../proto/types/farhand/agent/v1/GetInventoryResponse.ts';
import type { AgentStub, Asking } from '../../shared/agent-rpcs.ts';
import { inventoryLists, systemFacts } from '../../shared/api/inventory.ts';
import { iso, latestInstant } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Collected } from './inventory-store.ts';

/**
 * Timeout of a collection in milliseconds. During a collection, the machine runs several programs at the same time,
 * each for at most 30 s.
 */
const deadlineMs = 90_000;

const system = systemFacts.extend({
  booted_at_ms: z.number().min(0).max(latestInstant),
  reboot_required: z.boolean().optional(),
  package_format: z.enum(['deb', 'rpm', 'apk', 'pacman', '']),
});
const answer = inventoryLists.extend({ system });

type Lists = keyof typeof inventoryLists.shape;
const names = Object.keys(inventoryLists.shape) as Lists[];
const mostItems = 40_000;

export async function collectInventory(
  stub: AgentStub,
  { request_id, caller }: { request_id: string; caller: Asking },
): Promise<Collected> {
  const lists: Record<string, unknown[]> = Object.fromEntries(names.map((name) => [name, []]));
  let found: GetInventoryResponse__Output['system'] = null;
  let items = 0;
  const options = { request_id, caller, deadline_ms: deadlineMs, idle_ms: 0 };
  for await (const part of stub.getInventory({}, options)) {
    found ??= part.system;
    for (const name of names) {
      items += part[name].length;
      if (items > mostItems) throw invalid(`more than ${mostItems} items`);
      lists[name]?.push(...part[name]);
    }
  }
  const parsed = answer.safeParse({ system: found, ...lists });
  if (!parsed.success) throw invalid(parsed.error.issues[0]?.path.join('.') ?? '');
  const { system, packages, ...others } = parsed.data;
  const { booted_at_ms, reboot_required = null, package_format, ...facts } = system;
  return {
    facts: {
      ...facts,
      booted_at: iso(booted_at_ms),
      reboot_required,
      package_format: package_format || null,
    },
    lists: others,
    packages,
  };
}

function invalid(what: string): AppError {
  return new AppError('machine_error', `the machine’s inventory is invalid (${what}): update its agent`);
}

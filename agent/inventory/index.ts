// The rpc GetInventory. The code that collects the inventory is loaded at the first call. This saves memory on agents
// that get no such call.
import type { GetInventoryResponse } from '../../proto/types/farhand/agent/v1/GetInventoryResponse.ts';
import type { AgentMethods } from '../../shared/agent-rpcs.ts';
import { Semaphore } from '../../shared/semaphore.ts';

/** Maximum number of list items in one frame. With it, a frame stays far below the maximum size of a gRPC message. */
const itemsPerFrame = 500;

/** Returns the handler. Only one collection runs at a time, because each collection starts programs on the machine. */
export function createInventory(): Pick<AgentMethods, 'getInventory'> {
  const turn = new Semaphore(1);
  return {
    async *getInventory(_request, { signal }) {
      const { collect } = await import('./collect.ts');
      yield* framesOf(await turn.run(signal, () => collect(signal)));
    },
  };
}

/** Splits an inventory into frames. The first frame has `system`. */
function* framesOf({ system, ...lists }: GetInventoryResponse): Generator<GetInventoryResponse> {
  if (system) yield { system };
  for (const [name, items = []] of Object.entries<readonly object[] | undefined>(lists)) {
    for (let at = 0; at < items.length; at += itemsPerFrame)
      yield { [name]: items.slice(at, at + itemsPerFrame) };
  }
}

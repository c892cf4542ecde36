// Finds machines by a part of their name, for fields in which the user types it.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { may } from '../login-state.ts';
import { useTyped } from '../parts/use-data.ts';

type Found = Awaited<ReturnType<typeof client.machines.list>>['items'];

const most = 8;

/** Returns the machines whose name contains the text. The search begins once the user stops typing. */
export function useMachinesByName(text: string, wanted = true): Found {
  const [found, setFound] = useState<Found>([]);
  const search = (signal: AbortSignal) =>
    client.machines.list({ limit: most, sort: 'name', ...(text && { search: text }) }, { signal });
  useTyped([text, wanted], wanted && may('machines:read') ? search : undefined, ({ items }) =>
    setFound(items),
  );
  // Until the broker answers, `found` has the machines that matched the previous text. Those that do not match the new
  // text are left out, so that Enter cannot choose them.
  const letters = text.toLowerCase();
  return found.filter(({ name }) => name.toLowerCase().includes(letters));
}

/** The index of the current one of the found items. ArrowUp and ArrowDown change it, and Enter chooses the item. */
export function useCurrent<T>(found: readonly T[], choose: (item: T | undefined) => void) {
  const [at, setAt] = useState(0);
  const onKey = (event: KeyboardEvent): void => {
    const step = event.key === 'ArrowDown' ? 1 : event.key === 'ArrowUp' ? -1 : 0;
    if (step !== 0) setAt((at + step + found.length) % Math.max(1, found.length));
    else if (event.key === 'Enter') choose(found[at]);
    else return;
    event.preventDefault();
  };
  return { at, setAt, onKey };
}

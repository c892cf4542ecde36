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

/** Returns the index that ArrowUp or ArrowDown selects after `at` in a list of `length` items; otherwise undefined. */
export function indexAfterKey(key: string, at: number, length: number): number | undefined {
  const step = key === 'ArrowDown' ? 1 : key === 'ArrowUp' ? -1 : 0;
  return step === 0 ? undefined : (at + step + length) % Math.max(1, length);
}

// The dialog with the rights of a key: its scopes in words, and the machines that it may use now.
import { client } from '../api-client.ts';
import { learnNames, nameOf } from '../machines/names.tsx';
import { Show } from '../parts/loading-failed-or-empty.tsx';
import { Dialog } from '../parts/small-components.tsx';
import { useData } from '../parts/use-data.ts';
import { to } from '../router.ts';
import type { Key } from './key-form.tsx';
import { scopeTexts } from './scopes.ts';

/** Maximum number of links that are drawn. */
const mostLinks = 100;

interface Reached {
  ids: readonly string[];
  total: number;
}

async function machinesOf({ machine_ids, tags }: Key, signal: AbortSignal): Promise<Reached> {
  if (machine_ids === null && tags === null) {
    const { items, total } = await client.machines.list({ sort: 'name', limit: mostLinks }, { signal });
    learnNames(items);
    return { ids: items.map(({ id }) => id), total };
  }
  const found = new Map<string, { id: string; name: string }>();
  for (const tag of tags ?? [])
    for await (const machine of client.machines.list({ tags: tag, sort: 'name', limit: 100 }, { signal }))
      found.set(machine.id, machine);
  learnNames([...found.values()]);
  const ids = new Set([...(machine_ids ?? []), ...found.keys()]);
  return { ids: [...ids].slice(0, mostLinks), total: ids.size };
}

export function KeyRights({ apiKey, close }: { apiKey: Key; close: () => void }) {
  const { name, scopes, tags, machine_ids } = apiKey;
  const loaded = useData((signal) => machinesOf(apiKey, signal), [apiKey.id]);
  const everything = machine_ids === null && tags === null;
  return (
    <Dialog title={`What ${name} may do`} onClose={close}>
      <div class="dialog-body">
        <ul class="rights">
          {scopes.map((scope) => (
            <li key={scope}>
              {scopeTexts[scope]} <code>{scope}</code>
            </li>
          ))}
        </ul>
        <h3>On these machines</h3>
        <Show of={loaded}>
          {({ ids, total }) => (
            <>
              <p class="muted">
                {total.toLocaleString()} now
                {everything && '; every machine, also those that join later'}
                {tags && `; also machines that get the tag ${tags.join(' or ')} later`}
              </p>
              <p class="reached">
                {ids.map((id) => (
                  <a key={id} href={to('/machines', id)}>
                    {nameOf(id)}
                  </a>
                ))}
                {total > ids.length && (
                  <span class="muted">and {(total - ids.length).toLocaleString()} more</span>
                )}
              </p>
            </>
          )}
        </Show>
      </div>
    </Dialog>
  );
}

// Lists the brokers on this database for the REST API, with their leases and the number of their machines.
import type { Api, Input, Reply } from '../../shared/api/route-table.ts';
import { iso } from '../../shared/clock.ts';
import { type RowReader, textIn } from '../history/history-database.ts';
import { listingBrokers } from './cluster-tables.ts';

/** `self` is the id of this broker. */
export async function listBrokers(
  { sort, limit, offset }: Input<Api['brokers']['list']>,
  history: RowReader,
  self: string,
): Promise<Reply<Api['brokers']['list']>> {
  const rows = await history.all(listingBrokers);
  const field = sort.endsWith('url') ? 'url' : 'machines';
  const items = rows
    .map((row) => ({
      id: textIn(row, 'id'),
      url: textIn(row, 'url'),
      status: Number(row.seconds) > 0 ? ('online' as const) : ('offline' as const),
      lease_until: iso(Number(row.until_ms)),
      machines: Number(row.machines),
      linked: Number(row.linked),
      self: row.id === self,
    }))
    .toSorted((a, b) => (a[field] < b[field] ? -1 : a[field] > b[field] ? 1 : 0));
  if (sort.startsWith('-')) items.reverse();
  return { items: items.slice(offset, offset + limit), total: items.length };
}

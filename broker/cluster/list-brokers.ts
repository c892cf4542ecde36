// Lists the brokers on this database for the REST API, with their leases and the number of their machines.
import { brokers as routes } from '../../shared/api/brokers.ts';
import type { Api, Input, Reply } from '../../shared/api/route-table.ts';
import { iso } from '../../shared/clock.ts';
import { type RowReader, textIn } from '../history/history-database.ts';
import { pageOf } from '../list-pages-and-filters.ts';
import { listingBrokers } from './cluster-tables.ts';

/** `self` is the id of this broker. */
export async function listBrokers(
  input: Input<Api['brokers']['list']>,
  history: RowReader,
  self: string,
): Promise<Reply<Api['brokers']['list']>> {
  const rows = await history.all(listingBrokers);
  const items = rows.map((row) => ({
    id: textIn(row, 'id'),
    url: textIn(row, 'url'),
    status: Number(row.seconds) > 0 ? ('online' as const) : ('offline' as const),
    lease_until: iso(Number(row.until_ms)),
    machines: Number(row.machines),
    linked: Number(row.linked),
    self: row.id === self,
  }));
  return pageOf(routes.list, items, input);
}

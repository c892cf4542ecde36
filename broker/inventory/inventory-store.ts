// Stores the last inventory of each machine in the history. Each installed package has a row of its own, so that a
// query can find the machines that have a package.
import type { PackageFormat } from '../../shared/api/inventory.ts';
import type { Api, Reply } from '../../shared/api/route-table.ts';
import { iso } from '../../shared/clock.ts';
import {
  type History,
  type HistoryTransaction,
  jsonIn,
  type Row,
  textIn,
} from '../history/history-database.ts';

export type Inventory = Reply<Api['inventory']['get']>;
export type Package = Inventory['packages'][number];
type Listed = Reply<Api['inventory']['list']>['items'][number];
type Facts = NonNullable<Listed['facts']>;
type Lists = Pick<
  Inventory,
  'disks' | 'interfaces' | 'updates' | 'ports' | 'failed_units' | 'containers' | 'incomplete'
>;

/** An inventory as a machine has sent it. */
export interface Collected {
  facts: Facts;
  lists: Lists;
  packages: Package[];
}

/** The parts of an inventory that each item of GET /inventory contains. */
export type Summary = Pick<Listed, 'collected_at' | 'facts' | 'updates'>;

/** A package on a machine. `package_format` decides by which rule its version is compared with others. */
export interface FoundPackage {
  machine_id: string;
  package_format: PackageFormat | undefined;
  package: Package;
}

const tables = [
  `CREATE TABLE inventories (
    machine_id TEXT PRIMARY KEY, collected_at INTEGER NOT NULL, facts TEXT NOT NULL, lists TEXT NOT NULL,
    updates INTEGER NOT NULL
  ) WITHOUT ROWID;
  CREATE TABLE inventory_packages (
    machine_id TEXT NOT NULL, name TEXT NOT NULL, version TEXT NOT NULL, arch TEXT NOT NULL,
    PRIMARY KEY (machine_id, name, version, arch)
  ) WITHOUT ROWID;
  CREATE INDEX inventory_packages_by_name ON inventory_packages (name)`,
];

/** Number of packages that one statement inserts. */
const rowsAtOnce = 50;

export class InventoryRecords {
  readonly #history: History;

  private constructor(history: History) {
    this.#history = history;
  }

  static async open(history: History): Promise<InventoryRecords> {
    await history.migrate('inventories', tables);
    return new InventoryRecords(history);
  }

  async get(machine_id: Inventory['machine_id']): Promise<Inventory | undefined> {
    const [[row] = [], packages = []] = await this.#history.read([
      { sql: 'SELECT * FROM inventories WHERE machine_id = ?', values: [machine_id] },
      {
        sql: 'SELECT name, version, arch FROM inventory_packages WHERE machine_id = ? ORDER BY name, version, arch',
        values: [machine_id],
      },
    ]);
    if (!row) return undefined;
    // The casts are safe: the broker wrote these columns from values of the same types.
    const [facts, lists] = [jsonIn(row, 'facts') as Facts, jsonIn(row, 'lists') as Lists];
    const collected_at = iso(Number(row.collected_at));
    return { machine_id, collected_at, ...facts, ...lists, packages: packages.map(packageIn) };
  }

  async summaries(machineIds: readonly string[]): Promise<Map<string, Summary>> {
    const sql = `SELECT machine_id, collected_at, facts, updates FROM inventories
      WHERE machine_id IN (SELECT value FROM json_each(?))`;
    const [rows = []] = await this.#history.read([{ sql, values: [JSON.stringify(machineIds)] }]);
    return new Map(
      rows.map((row) => [
        textIn(row, 'machine_id'),
        {
          collected_at: iso(Number(row.collected_at)),
          facts: jsonIn(row, 'facts') as Facts,
          updates: Number(row.updates),
        },
      ]),
    );
  }

  /** Returns the time of each machine's last collection, in milliseconds since 1970. */
  async times(): Promise<Map<string, number>> {
    const [rows = []] = await this.#history.read([
      { sql: 'SELECT machine_id, collected_at FROM inventories', values: [] },
    ]);
    return new Map(rows.map((row) => [textIn(row, 'machine_id'), Number(row.collected_at)]));
  }

  /** Returns all packages of one name, on all machines. */
  async packagesNamed(name: string): Promise<FoundPackage[]> {
    const sql = `SELECT p.machine_id, p.name, p.version, p.arch, i.facts FROM inventory_packages p
      JOIN inventories i ON i.machine_id = p.machine_id WHERE p.name = ? ORDER BY p.version, p.arch`;
    const [rows = []] = await this.#history.read([{ sql, values: [name] }]);
    return rows.map((row) => ({
      machine_id: textIn(row, 'machine_id'),
      package_format: (jsonIn(row, 'facts') as Facts).package_format ?? undefined,
      package: packageIn(row),
    }));
  }

  async save(
    transaction: HistoryTransaction,
    machine_id: string,
    collected_at: number,
    { facts, lists, packages }: Collected,
  ): Promise<void> {
    transaction.put('inventories', 'machine_id', {
      ...{ machine_id, collected_at, updates: lists.updates.length },
      ...{ facts: JSON.stringify(facts), lists: JSON.stringify(lists) },
    });
    const of = 'FROM inventory_packages WHERE machine_id = ?';
    const before = byContent(
      (await transaction.all(`SELECT name, version, arch ${of}`, machine_id)).map(packageIn),
    );
    const after = byContent(packages);
    // Only changed packages are written, because most packages do not change between two collections.
    for (const [key, one] of before) {
      const sql = `DELETE ${of} AND name = ? AND version = ? AND arch = ?`;
      if (!after.has(key)) transaction.run(sql, machine_id, one.name, one.version, one.arch);
    }
    const added = [...after].flatMap(([key, one]) => (before.has(key) ? [] : [one]));
    const single = added.length % rowsAtOnce;
    // Rows are inserted one at a time or `rowsAtOnce` at a time, so that two prepared statements are enough.
    for (let at = 0; at < added.length; ) {
      const some = added.slice(at, at + (at < single ? 1 : rowsAtOnce));
      const rows = some.map(() => '(?, ?, ?, ?)').join(', ');
      const values = some.flatMap((one) => [machine_id, one.name, one.version, one.arch]);
      transaction.run(
        `INSERT INTO inventory_packages (machine_id, name, version, arch) VALUES ${rows}`,
        ...values,
      );
      at += some.length;
    }
  }

  remove(transaction: HistoryTransaction, machineId: string): void {
    transaction.run('DELETE FROM inventories WHERE machine_id = ?', machineId);
    transaction.run('DELETE FROM inventory_packages WHERE machine_id = ?', machineId);
  }
}

const packageIn = (row: Row): Package => ({
  name: textIn(row, 'name'),
  version: textIn(row, 'version'),
  arch: textIn(row, 'arch'),
});

const byContent = (packages: readonly Package[]): Map<string, Package> =>
  new Map(packages.map((one) => [JSON.stringify([one.name, one.version, one.arch]), one]));

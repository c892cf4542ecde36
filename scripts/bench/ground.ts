// What the parts of the files bench stand on: what was started for them, and where they read and write.
import type { Farhand, Running } from './programs.ts';
import type { Table } from './race.ts';
import type { Ssh } from './ssh.ts';

export interface Ground {
  folder: string;
  /** MiB of the large file. */
  size: number;
  runs: number;
  table: Table;
  farhand: Farhand;
  /** Its routes for files on its first machine. */
  files: string;
  /** The large file, and where copies are made. */
  source: string;
  copy: string;
  /** The bare server, whose folder is that of source and copy. */
  plain: Running;
  /** Resident MiB of each program before any work. */
  idle: Map<Running, number>;
  ssh: Ssh | undefined;
  /** Programs of the system that are there. */
  has: Set<string>;
}

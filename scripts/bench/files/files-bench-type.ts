// What all parts of the files bench use: the started programs, and the paths that they read and write.

import type { Table } from '../compare-programs-in-turns.ts';
import type { Commands, Farhand, Running } from '../start-and-measure-programs.ts';
import type { Ssh } from '../start-sshd.ts';

export interface FilesBench {
  folder: string;
  /** MiB of the large file. */
  size: number;
  runs: number;
  /** Names of the programs that Farhand is compared with (option --beside); undefined for all programs. */
  beside: string[] | undefined;
  table: Table;
  farhand: Farhand;
  /** The commands with which broker and agent were started. */
  commands: Commands;
  /** URL of the file routes for the broker's first machine. */
  files: string;
  /** Path of the large file. */
  source: string;
  /** Path to which the copies of the large file are written. */
  copy: string;
  /** A bare node:http file server for comparison. It serves the folder of `source` and `copy`. */
  plain: Running;
  /** Resident MiB of each program before the first measurement. */
  idle: Map<Running, number>;
  ssh: Ssh | undefined;
}

// The objects that all parts of the files bench use: the started programs, and the paths that they read and
// write.

import type { Table } from '../compare-programs-in-turns.ts';
import type { Commands, Farhand, Running } from '../start-and-measure-programs.ts';
import type { Ssh } from '../start-sshd.ts';

export interface FilesBench {
  folder: string;
  /** MiB of the large file. */
  size: number;
  runs: number;
  /** Names of the programs to compare Farhand with (option --beside); all programs if undefined. */
  beside: string[] | undefined;
  table: Table;
  farhand: Farhand;
  /** The commands that started broker and agent. */
  commands: Commands;
  /** URL of the file routes of the broker's first machine. */
  files: string;
  /** Path of the large file. */
  source: string;
  /** Path to which the copies of the large file are written. */
  copy: string;
  /** A minimal node:http file server for comparison. It serves the folder that contains `source` and `copy`. */
  plain: Running;
  /** Resident MiB of each program before any work. */
  idle: Map<Running, number>;
  ssh: Ssh | undefined;
  /** Programs of the system that are installed. */
  has: Set<string>;
}

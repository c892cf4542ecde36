// Prints and stores the figures of a run as they come, and prints all of them as a table at the end.
import { appendFileSync, mkdirSync, writeFileSync } from 'node:fs';
import { dirname } from 'node:path';
import { rounded, Table } from '../compare-programs-in-turns.ts';
import type { Probed } from './http-load.ts';

export class Figures extends Table {
  readonly #out: string | undefined;

  /** `out` is the file for the raw output, which is replaced. */
  constructor(out: string | undefined, head?: ConstructorParameters<typeof Table>[0]) {
    super(head);
    this.#out = out;
    if (out === undefined) return;
    mkdirSync(dirname(out), { recursive: true });
    writeFileSync(out, '');
  }

  override row(what: string, ours: string, beside = '', ratio = ''): void {
    super.row(what, ours, beside, ratio);
    this.line([what, ours, beside, ratio].filter((cell) => cell !== '').join(' | '));
  }

  /** Prints the functions that used the most CPU in a profile, one per line. */
  profile(what: string, top: string[]): void {
    for (const line of top) this.line(`profile, ${what}: ${line}`);
  }

  /** Prints a line of raw output that is not part of the table. */
  line(text: string): void {
    console.error(text);
    if (this.#out !== undefined) appendFileSync(this.#out, `${text}\n`);
  }

  override failure(what: string, error: unknown): void {
    super.failure(what, error);
    this.line(`failed: ${what}: ${error instanceof Error ? error.stack : String(error)}`);
  }
}

export const milliseconds = (value: number): string => `${rounded(value)} ms`;

export function describeProbe({ requests, failed, p50, p99, longest }: Probed): string {
  const times = `p50 ${milliseconds(p50)}, p99 ${milliseconds(p99)}, longest ${milliseconds(longest)}`;
  return `${times} (${requests} requests${failed > 0 ? `, ${failed} failed` : ''})`;
}

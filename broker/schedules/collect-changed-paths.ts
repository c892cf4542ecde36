// Collects the changes of a watched path for one run of a command. Collecting ends after `settle` milliseconds without
// a change.
import { isUtf8 } from 'node:buffer';
import type { FileChange__Output } from '../../proto/types/farhand/agent/v1/FileChange.ts';
import { monotonic } from '../../shared/clock.ts';

/** Maximum time to wait for further changes, as a multiple of `settle`. Then the command runs in any case. */
const mostSettles = 10;
/** Maximum number of changed paths that are passed to a command. */
const mostPaths = 1_000;
/** Maximum total length in bytes of the changed paths that are passed to a command. */
const mostBytes = 32 * 1024;

export class Changes {
  /** `catch_up` if the path changed while it was not watched. */
  readonly trigger: 'change' | 'catch_up';
  readonly #since = monotonic();
  /** The changed paths; undefined if some are unknown, or if they do not fit into an environment variable. */
  #paths: Set<string> | undefined = new Set();
  #bytes = 0;

  constructor(trigger: 'change' | 'catch_up') {
    this.trigger = trigger;
  }

  /** Returns the milliseconds to wait for further changes. */
  wait(settle: number): number {
    return Math.max(0, Math.min(settle, this.#since + mostSettles * settle - monotonic()));
  }

  add(changes: readonly FileChange__Output[]): void {
    for (const { kind, path } of changes) {
      if (kind === 'FILE_CHANGE_KIND_OVERFLOW') this.forgetPaths();
      else this.#addPath(path);
    }
  }

  /** Drops all changed paths, so that the command gets none. An incomplete list would look complete to the command. */
  forgetPaths(): void {
    this.#paths = undefined;
  }

  #addPath(path: Buffer): void {
    const text = path.toString();
    if (!this.#paths || this.#paths.has(text)) return;
    this.#bytes += path.length + 1;
    // The command gets one path per line. No paths are passed if one of them is not UTF-8, or has a character that some
    // programs take for the end of a line.
    const isLine = isUtf8(path) && !/[\p{Cc}\p{Zl}\p{Zp}]/u.test(text);
    if (!isLine || this.#bytes > mostBytes || this.#paths.size >= mostPaths) this.forgetPaths();
    else this.#paths.add(text);
  }

  /** Returns the environment of the command: all changed paths, one per line, or an empty text after forgetPaths(). */
  environment(): Record<string, string> {
    return { FARHAND_CHANGED_PATHS: [...(this.#paths ?? [])].join('\n') };
  }
}

// Merges the output of all commands of a batch into one stream.
import { addAbortListener } from 'node:events';
import { mostFollowed } from '../../shared/api/batches.ts';
import type { Api, Caller, Reply } from '../../shared/api/route-table.ts';
import { AppError } from '../../shared/errors.ts';
import type { OutputLog } from '../../shared/output-log.ts';
import { mergeStreams } from '../merge-streams.ts';
import type { Command } from './command-record.ts';
import { eventOf, partsFrom, type Source } from './read-output.ts';

export type Sent = Reply<Api['batches']['stream']> extends AsyncIterable<infer T> ? T : never;

/** Maximum number of bytes in one event. A piece of this size may be in memory for each command. */
const pieceBytes = 16 * 1024;

/**
 * Follows commands to their ends, beginning with the last `tail` bytes of each output. Leaves out machines that the
 * caller may no longer use.
 */
export function followMembers(
  members: readonly Command[],
  sourceOf: (id: string) => Promise<Source>,
  tail: number,
  caller: Caller,
): AsyncGenerator<Sent> {
  async function* follow({ id: command_id, machine_id }: Command): AsyncGenerator<Sent> {
    const source = await sourceOf(command_id);
    const { output, away } = source;
    // `away` is set if another broker has the output files. This broker then sends only the end of the output, which is
    // in the database. This end begins at offset `start`.
    const firstOf = ({ start, end }: OutputLog): number => Math.max(away ? start : 0, end - tail);
    const from = { stdout: firstOf(output.stdout), stderr: firstOf(output.stderr) };
    for await (const part of partsFrom(source, from, caller.signal, true, pieceBytes)) {
      if (!caller.reaches(machine_id)) return;
      const { event, data } = eventOf(part);
      yield { event, data: { command_id, machine_id, ...data } };
    }
  }
  // Commands that have ended are read one after another, so that few files are open.
  async function* one(after: readonly Command[]): AsyncGenerator<Sent> {
    for (const member of after) yield* follow(member);
  }
  const ended = members.filter(({ finished_at }) => finished_at !== null);
  const open = members.filter(({ finished_at }) => finished_at === null);
  return mergeStreams([one(ended), ...open.map(follow)], caller.signal);
}

/**
 * Maximum number of commands that one key may follow at once, in all its streams of batches. For each command,
 * `pieceBytes` of output may be in memory.
 */
const mostOfKey = 5 * mostFollowed;

/** Each stream counts as at least this many commands toward `mostOfKey`, so a key can have at most 100 streams. */
const leastCost = mostOfKey / 100;

/** Limits how many commands each key may follow at once with GET /batches/{batch_id}/stream. */
export class FollowLimit {
  readonly #byKey = new Map<string, number>();

  /**
   * Adds these commands to the number that the caller's key follows, until the caller's request ends. Throws
   * unavailable if that number would exceed `mostOfKey`.
   */
  take({ key_id, signal }: Caller, { length }: readonly Command[]): void {
    // A stream of few commands still costs a connection and some reads.
    const cost = Math.max(length, leastCost);
    const used = (this.#byKey.get(key_id) ?? 0) + cost;
    if (used > mostOfKey) throw tooManyFollowed;
    this.#byKey.set(key_id, used);
    const release = (): void => {
      const left = (this.#byKey.get(key_id) ?? 0) - cost;
      if (left > 0) this.#byKey.set(key_id, left);
      else this.#byKey.delete(key_id);
    };
    addAbortListener(signal, release);
  }
}

const tooManyFollowed = new AppError(
  'unavailable',
  `this key follows too many batches (at most 100 streams and ${mostOfKey} commands at once); close a stream and try again`,
);

/** Throws conflict for a batch with too many machines to follow in one stream. */
export function assertFollowable(batch_id: string, machines: number): void {
  if (machines <= mostFollowed) return;
  const message = `batch ${batch_id} has ${machines} machines, and at most ${mostFollowed} can be followed in one stream; follow its commands one by one`;
  throw new AppError('conflict', message, { batch_id, limit: mostFollowed });
}

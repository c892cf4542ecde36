// What people declare: state.json through lowdb with our own adapter. One rename commits a change with its outbox.
import { randomBytes } from 'node:crypto';
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { Low } from 'lowdb';
import { after } from '../../shared/clock.ts';
import { removeLeftovers } from '../../shared/durable-file.ts';
import { StartError } from '../../shared/errors.ts';
import type { Entry } from '../history.ts';
import {
  type Collections,
  type Declared,
  type Documents,
  type JoinToken,
  type Key,
  type Machine,
  type Schedule,
  version,
  type Webhook,
} from './documents.ts';
import { type Draft, draftOf, foundBy } from './draft.ts';
import { commandBack, DurableFile, textOf } from './file.ts';

export type { Declared, Draft, JoinToken, Key, Machine, Schedule, Webhook };
export { foundBy };

/** What is committed. Never change it. */
export interface State extends Declared {
  readonly installId: string;
  readonly generation: number;
  /**
   * Runs `edit` on a draft and resolves with its result once the change is on disk and its outbox in history.
   * Changes that arrive together share one commit; an edit that throws, or a commit that fails, leaves no trace. What
   * history cannot take now is brought to it again until it does.
   */
  change<T>(edit: (draft: Draft) => T): Promise<T>;
  /** Calls back after each committed change; the result stops it. */
  watch(watcher: () => void): () => void;
  /** Says where the outbox goes, and sends what an earlier run left in it. */
  drainTo(apply: (entries: readonly Entry[]) => Promise<void>): Promise<void>;
  /** Calls back once, while no commit is under way, with the text of state.json as it is on disk. */
  between<T>(look: (text: string) => T): Promise<T>;
  /** Waits for commits under way. */
  close(): Promise<void>;
}

/** Files that only a broker which has run leaves behind: with one of them present, no state.json means loss. */
const traces = ['state.json.last', 'history.db', 'authority.json'];

/** After so long it is tried again to bring the outbox to history, or to undo a commit. */
const againMs = 2_000;

/**
 * Opens the state of a directory, or begins one where no broker has ever been. Throws StartError on loss, on damage, and
 * unless `acceptEdit` on an edit by hand.
 */
export async function openState(directory: string, acceptEdit = false): Promise<State> {
  await removeLeftovers(join(directory, 'state.json'));
  const adapter = new DurableFile(directory, acceptEdit);
  const found = await adapter.read();
  if (!found) refuseLoss(directory);
  const fresh: Documents = {
    version,
    install_id: randomBytes(16).toString('hex'),
    generation: 1,
    machines: [],
    keys: [],
    join_tokens: [],
    schedules: [],
    webhooks: [],
    outbox: [],
  };
  const low = new Low<Documents>(adapter, found ?? fresh);
  if (!found) await low.write();
  return stateOver(low, adapter);
}

function refuseLoss(directory: string): void {
  const trace = traces.find((name) => existsSync(join(directory, name)));
  if (!trace) return;
  const file = join(directory, 'state.json');
  const how = commandBack(file) ?? `put state.json from a backup into ${directory}`;
  throw new StartError(
    `${file} is missing, though a broker has run here (${trace} exists); to recover: ${how}`,
  );
}

interface Pending {
  edit(draft: Draft): void;
  resolve(): void;
  reject(error: unknown): void;
}

function stateOver(low: Low<Documents>, file: DurableFile): State {
  let committed = collectionsOf(low.data);
  let queue: Pending[] = [];
  let looks: (() => void)[] = [];
  let running: Promise<void> | undefined;
  const watchers = new Set<() => void>();
  let apply: ((entries: readonly Entry[]) => Promise<void>) | undefined;
  /** Entries of the file's outbox that history has: they go with the next write. */
  let applied = 0;
  let cancelAgain = (): void => {};

  async function run(): Promise<void> {
    do {
      const [group, looking] = [queue, looks];
      [queue, looks] = [[], []];
      for (const look of looking) look();
      await commit(group).catch((error: unknown) => {
        for (const member of group) member.reject(error);
      });
    } while (queue.length > 0 || looks.length > 0);
    running = undefined;
  }

  /** Does what an earlier commit has left to do; what fails again is tried again later. */
  async function finish(): Promise<void> {
    cancelAgain();
    try {
      await file.revert();
      await drain();
    } catch {
      cancelAgain = after(againMs, () => {
        running ??= run();
      });
    }
  }

  async function commit(group: Pending[]): Promise<void> {
    const { next, entries, done } = editAll(committed, group);
    if (done.length === 0) return finish();
    const before = low.data;
    low.data = {
      ...before,
      generation: before.generation + 1,
      machines: [...next.machines.values()],
      keys: [...next.keys.values()],
      join_tokens: [...next.join_tokens.values()],
      schedules: [...next.schedules.values()],
      webhooks: [...next.webhooks.values()],
      outbox: [...before.outbox.slice(applied), ...entries],
    };
    try {
      await low.write();
    } catch (error) {
      low.data = before;
      await finish();
      throw file.mayHoldFailed
        ? new Error('a change failed, and is not undone yet', { cause: error })
        : error;
    }
    committed = next;
    applied = 0;
    await finish();
    for (const watcher of [...watchers]) watcher();
    for (const member of done) member.resolve();
  }

  /** While history cannot be written, the outbox has the entries: the change itself is safe. */
  async function drain(): Promise<void> {
    const { outbox } = low.data;
    if (!apply || applied === outbox.length) return;
    await apply(outbox);
    applied = outbox.length;
  }

  return {
    get installId() {
      return low.data.install_id;
    },
    get generation() {
      return low.data.generation;
    },
    get machines() {
      return committed.machines;
    },
    get keys() {
      return committed.keys;
    },
    get joinTokens() {
      return committed.join_tokens;
    },
    get schedules() {
      return committed.schedules;
    },
    get webhooks() {
      return committed.webhooks;
    },
    change(edit) {
      return new Promise((resolve, reject) => {
        let result: ReturnType<typeof edit>;
        queue.push({
          edit: (draft) => {
            result = edit(draft);
          },
          resolve: () => resolve(result),
          reject,
        });
        running ??= run();
      });
    },
    between(look) {
      return new Promise((resolve, reject) => {
        looks.push(() => {
          try {
            resolve(look(textOf(low.data)));
          } catch (error) {
            reject(error);
          }
        });
        running ??= run();
      });
    },
    watch(watcher) {
      watchers.add(watcher);
      return () => void watchers.delete(watcher);
    },
    async drainTo(target) {
      apply = target;
      const { outbox } = low.data;
      if (outbox.length > 0) await target(outbox);
      applied = outbox.length;
    },
    async close() {
      while (running) await running;
      cancelAgain();
      await file.revert().catch(() => {});
    },
  };
}

function collectionsOf(data: Documents): Collections {
  return {
    machines: new Map(data.machines.map((document) => [document.id, document])),
    keys: new Map(data.keys.map((document) => [document.id, document])),
    join_tokens: new Map(data.join_tokens.map((document) => [document.id, document])),
    schedules: new Map(data.schedules.map((document) => [document.id, document])),
    webhooks: new Map(data.webhooks.map((document) => [document.id, document])),
  };
}

/** Runs every edit on one draft; an edit that throws is undone and told, the others go on. */
function editAll(base: Collections, group: Pending[]) {
  let next = base;
  let entries: Entry[] = [];
  const done: Pending[] = [];
  for (const member of group) {
    const draft = draftOf(next);
    try {
      member.edit(draft.draft);
      next = draft.result();
      entries = [...entries, ...draft.entries];
      done.push(member);
    } catch (error) {
      member.reject(error);
    }
  }
  return { next, entries, done };
}

// Live updates: one stream of changes from the broker for the whole page, shared by all its parts.
import { computed, effect, signal } from '@preact/signals';
import { useEffect } from 'preact/hooks';
import { FarhandError, streams } from './api-client.ts';
import { identifyAgain, may } from './login-state.ts';
import { after } from './timers.ts';

export type Update = typeof streams.live.follow extends (
  ...input: never[]
) => AsyncIterable<{ data: infer T }>
  ? T
  : never;
export type Happened = NonNullable<Update['event']>;

/**
 * True while the page tries to open the stream again, after it broke or did not open. Data on the page may then be out
 * of date.
 */
export const lost = signal(false);

const listeners = new Set<{ heard: (update: Update) => void; returned: () => void }>();
/** Topics that the open page follows, each with the number of parts that follow it. */
const followed = signal<ReadonlyMap<string, number>>(new Map());
const topics = computed(() =>
  [...(may('machines:read') ? ['events'] : []), ...followed.value.keys()].sort().join(','),
);
/**
 * True while the tab is in the foreground. A tab in the background has no stream, because a browser opens at most six
 * HTTP/1.1 connections to a host, for all of its tabs together.
 */
const visible = signal(document.visibilityState === 'visible');
const retryMs = 2_000;
const settleMs = 40;

/**
 * Calls `heard` with each update. Calls `returned` when the stream is open again after an interruption, because any
 * data may have changed meanwhile. listen() returns a function that ends these calls.
 */
export function listen(heard: (update: Update) => void, returned = (): void => {}): () => void {
  const listener = { heard, returned };
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Follows a further topic, such as `machines` or `batches:ID`, while the calling component is on the page. */
export function useTopic(topic: string | undefined): void {
  useEffect(() => {
    if (topic === undefined) return undefined;
    count(topic, 1);
    return () => count(topic, -1);
  }, [topic]);
}

function count(topic: string, change: number): void {
  const next = new Map(followed.peek());
  const number = (next.get(topic) ?? 0) + change;
  if (number > 0) next.set(topic, number);
  else next.delete(topic);
  followed.value = next;
}

/** Follows these topics. Without a topic, only waits until the broker answers. */
async function follow(of: string, stop: AbortSignal): Promise<void> {
  while (!stop.aborted) {
    try {
      if (of === '') {
        await streams.keys.me({ signal: stop });
        return opened();
      }
      for await (const { event, data } of streams.live.follow({ topics: of }, { signal: stop })) {
        if (event === 'ready') opened();
        else for (const { heard } of [...listeners]) heard(data);
      }
    } catch (error) {
      // Status 403 means that the key has lost rights. identifyAgain() loads its present rights, which decide the
      // available pages and topics.
      if (error instanceof FarhandError && error.status === 403) await identifyAgain();
      if (error instanceof FarhandError && [401, 403, 404].includes(error.status)) {
        // The broker has refused the stream, so it is back.
        if (lost.peek()) opened();
        return;
      }
    }
    if (stop.aborted) return;
    lost.value = true;
    await new Promise<void>((resolve) => after(retryMs, resolve));
  }
}

/** True if the page may have missed changes: its stream was open before, or its tab was opened in the background. */
let mayHaveMissed = !visible.peek();

function opened(): void {
  const isLate = mayHaveMissed || lost.peek();
  lost.value = false;
  // After an interruption or a failed first attempt, the page loads all data again, because it has missed changes. If
  // the first attempt succeeds, the data is still new.
  if (isLate) {
    void identifyAgain();
    for (const { returned } of [...listeners]) returned();
  }
  mayHaveMissed = true;
}

document.addEventListener('visibilitychange', () => {
  visible.value = document.visibilityState === 'visible';
});

/** Follows the stream until the returned function is called. */
export const startLive = (): (() => void) =>
  effect(() => {
    const of = topics.value;
    // A page without topics needs no stream. After a lost stream it still has to notice when the broker is back.
    if ((of === '' && !lost.peek()) || !visible.value) return undefined;
    const stop = new AbortController();
    // The stream is opened a moment later, because a new page adds several topics, and each change of topics opens a
    // new stream.
    const cancel = after(settleMs, () => void follow(of, stop.signal));
    return () => {
      cancel();
      stop.abort();
    };
  });

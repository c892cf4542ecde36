// Loads data for a page. The old data is displayed while new data is loaded, and leaving the page cancels its
// requests.
import { useCallback, useEffect, useRef, useState } from 'preact/hooks';
import { FarhandError } from '../api-client.ts';
import { type Happened, listen, type Update, useTopic } from '../live-updates.ts';
import { after, soon } from '../timers.ts';

export interface Loaded<T> {
  data: T | undefined;
  error: unknown;
  reload(): void;
  /** Replaces the data by data that came from elsewhere, such as an answer of another request. */
  replace(data: T): void;
}

/** Milliseconds without a key press after which the broker is asked about a text. */
const typingMs = 150;
/** Milliseconds from an event to the load that it causes. Events in this time cause no further load. */
const restMs = 1_000;
/**
 * Milliseconds until unavailable data is loaded again. Data may be unavailable because its machine is offline.
 */
const againMs = 2_000;

/**
 * Asks the broker about `inputs` once the user has stopped typing. Only the answer about the latest inputs is used.
 * Without `ask`, asks nothing.
 */
export function useTyped<T>(
  inputs: readonly unknown[],
  ask: ((signal: AbortSignal) => Promise<T>) | undefined,
  answered: (answer: T) => void,
  failed: (error: unknown) => void = () => {},
): void {
  useEffect(() => {
    if (!ask) return undefined;
    const stop = new AbortController();
    const cancel = after(typingMs, () => {
      ask(stop.signal).then(
        (answer) => !stop.signal.aborted && answered(answer),
        (error: unknown) => !stop.signal.aborted && failed(error),
      );
    });
    return () => {
      cancel();
      stop.abort();
    };
  }, inputs);
}

/** Loads data. Loads it again when one of `inputs` changes, and after an interruption of the live updates. */
export function useData<T>(
  load: (signal: AbortSignal) => Promise<T>,
  inputs: readonly unknown[],
  /** True for events that cause a load. Null for data that the user edits, so that only `inputs` cause loads. */
  when?: ((event: Happened) => boolean) | null,
  /** If set, live updates of this topic cause loads, and events do not. */
  topic?: 'commands' | `batches:${string}`,
): Loaded<T> {
  const [state, setState] = useState<Omit<Loaded<T>, 'reload' | 'replace'>>({
    data: undefined,
    error: undefined,
  });
  const [round, setRound] = useState(0);
  const reload = useCallback(() => setRound((before) => before + 1), []);
  const replace = useCallback((data: T) => setState({ data, error: undefined }), []);
  const loading = useRef(false);
  /** True if an event has arrived during a load. The next load starts after this one, because loads may be slow. */
  const again = useRef(false);
  const afterEvent = useCallback(() => {
    if (loading.current) again.current = true;
    else reload();
  }, []);
  useEffect(() => {
    const stop = new AbortController();
    loading.current = true;
    again.current = false;
    const end = (next: (before: typeof state) => typeof state): void => {
      if (stop.signal.aborted) return;
      loading.current = false;
      setState(next);
      if (again.current) reload();
    };
    load(stop.signal).then(
      (data) => end(() => ({ data, error: undefined })),
      (error: unknown) => end(({ data }) => ({ data, error })),
    );
    return () => stop.abort();
  }, [...inputs, round]);
  const { error } = state;
  useEffect(() => {
    const isUnavailable = error instanceof FarhandError && error.status === 503;
    return isUnavailable && when !== null ? after(againMs, reload) : undefined;
  }, [error]);
  useTopic(topic);
  useEvents(
    afterEvent,
    // A load that was begun before an interruption may never end.
    () => {
      loading.current = false;
    },
    topic
      ? ({ commands, batch }) => (topic === 'commands' ? commands : batch) !== undefined
      : when && (({ event }) => event !== undefined && when(event)),
  );
  return { ...state, reload, replace };
}

/**
 * Calls `run` after updates for which `when` is true, and after an interruption of the live updates, but at most once a
 * second. After an interruption, calls `interrupted` first, at once.
 */
function useEvents(
  run: () => void,
  interrupted: () => void,
  when: ((update: Update) => boolean) | null | undefined,
): void {
  const wanted = useRef(when);
  wanted.current = when;
  useEffect(() => {
    if (wanted.current === null) return undefined;
    const rest = soon(restMs, run);
    const stop = listen(
      (update) => wanted.current?.(update) && rest(),
      () => {
        interrupted();
        rest();
      },
    );
    return () => {
      stop();
      rest.cancel();
    };
  }, [run]);
}

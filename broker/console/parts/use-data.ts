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
  /** The load that is under way. A load after an event starts when it has ended, because loads may be slow. */
  const loading = useRef(Promise.resolve());
  useEffect(() => {
    const stop = new AbortController();
    const end = (next: (before: typeof state) => typeof state): void => {
      if (!stop.signal.aborted) setState(next);
    };
    loading.current = load(stop.signal).then(
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
  const isWanted = useRef<(update: Update) => boolean>(() => false);
  isWanted.current = ({ event, commands, batch }) =>
    topic === undefined
      ? event !== undefined && when?.(event) === true
      : (topic === 'commands' ? commands : batch) !== undefined;
  useEffect(() => {
    if (when === null) return undefined;
    const afterEvent = soon(restMs, () => void loading.current.then(reload));
    // After an interruption, the load does not wait: one that began before the interruption may never end.
    const stop = listen((update) => isWanted.current(update) && afterEvent(), reload);
    return () => {
      stop();
      afterEvent.cancel();
    };
  }, []);
  return { ...state, reload, replace };
}

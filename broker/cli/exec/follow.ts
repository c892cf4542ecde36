// Follows one command to its end: every byte of both outputs once, also over connections that break.
import { monotonic, sleep } from '../../../shared/clock.ts';
import { type Farhand, FarhandError } from '../../../shared/sdk/index.ts';

export type OutputStream = 'stdout' | 'stderr';
export type Told =
  Awaited<ReturnType<Farhand['commands']['stream']>> extends AsyncIterable<infer E>
    ? E extends { data: infer D }
      ? D
      : never
    : never;
export type End = Extract<Told, { status: unknown }>;

export interface Hearer {
  output(stream: OutputStream, bytes: Uint8Array): Promise<void> | void;
  /** So many bytes went before they could be had. */
  gap(stream: OutputStream, count: number): void;
}

/** A broker that is started anew is waited for. */
const patienceMs = 600_000;
const firstPauseMs = 100;
const longestPauseMs = 5_000;

export async function follow(
  client: Farhand,
  command_id: string,
  hearer: Hearer,
  signal?: AbortSignal,
): Promise<End> {
  let last_event_id: string | undefined;
  let heard = monotonic();
  for (let pause = firstPauseMs; ; pause = Math.min(2 * pause, longestPauseMs)) {
    try {
      const wish = { command_id, ...(last_event_id !== undefined && { last_event_id }) };
      const events = await client.commands.stream(wish, signal ? { signal } : {});
      for await (const { data, id } of events) {
        heard = monotonic();
        pause = firstPauseMs;
        if ('status' in data) return data;
        if ('from' in data) hearer.gap(data.stream, data.to - data.from);
        else await hearer.output(data.stream, Buffer.from(data.data, data.encoding));
        last_event_id = id ?? last_event_id;
      }
    } catch (error) {
      if (signal?.aborted || isFinal(error) || monotonic() - heard > patienceMs) throw error;
    }
    await sleep(pause, signal);
  }
}

/** What another attempt would not mend. */
function isFinal(error: unknown): boolean {
  if (error instanceof FarhandError) return error.status > 0 && error.status < 500 && error.status !== 429;
  // How fetch and the readers of its streams tell of a connection that broke.
  return !(error instanceof TypeError);
}

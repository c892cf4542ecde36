// The machines of a batch as cards, each with the last output of its command. One stream updates all cards.
import { useEffect, useReducer, useRef, useState } from 'preact/hooks';
import { type client, FarhandError, streams } from '../api-client.ts';
import { durationText } from '../format-times-and-sizes.ts';
import { nameOf } from '../machines/names.tsx';
import { More, State } from '../parts/small-components.tsx';
import { to } from '../router.ts';
import { after, clock, soon } from '../timers.ts';
import { outcome } from './command-list.tsx';
import { Output, OutputText } from './output-text.tsx';
import { reasonText } from './reason-text.ts';

export type Result = Awaited<ReturnType<typeof client.batches.get>>['results'][number];

/** `tail`: bytes of earlier output to read. `mostCharacters`: maximum number of characters that a card stores. */
const [tail, mostCharacters] = [4_096, 16_384];
/** `drawMs`: milliseconds between two drawings. `retryMs`: milliseconds until a lost stream is opened again. */
const [drawMs, retryMs] = [250, 2_000];
const mostCards = 100;

type Outputs = Map<string, Output>;

/**
 * Follows all commands of a batch until they have ended. Each new connection sends the last part of every output again,
 * so the outputs are cleared first.
 */
async function follow(
  batch: string,
  outputs: Outputs,
  signal: AbortSignal,
  changed: () => void,
): Promise<void> {
  while (!signal.aborted) {
    outputs.clear();
    try {
      for await (const { event, data } of streams.batches.stream({ batch_id: batch, tail }, { signal })) {
        if (event === 'end') return;
        if (!('command_id' in data) || !('stream' in data)) continue;
        const output = outputs.get(data.command_id) ?? new Output(mostCharacters);
        outputs.set(data.command_id, output);
        if ('data' in data) output.add(data.stream, data.data, data.encoding);
        else output.addGap(data.stream);
        changed();
      }
    } catch (error) {
      // The broker refuses the stream: the batch was removed or is too large to follow, or the login or its key may no
      // longer read the batch. A card without output from the stream displays the end of the stored output instead.
      if (error instanceof FarhandError && error.status >= 400 && error.status < 500) return;
    }
    await new Promise<void>((resolve) => after(retryMs, resolve));
  }
}

function useOutputs(batch: string): Outputs {
  const outputs = useRef<Outputs>(new Map());
  const [, draw] = useReducer((count: number, _: undefined) => count + 1, 0);
  useEffect(() => {
    const stop = new AbortController();
    const drawSoon = soon(drawMs, () => draw(undefined));
    void follow(batch, outputs.current, stop.signal, drawSoon);
    return () => {
      stop.abort();
      drawSoon.cancel();
    };
  }, [batch]);
  return outputs.current;
}

export function BatchCards({ batch, results }: { batch: string; results: readonly Result[] }) {
  const [most, setMost] = useState(mostCards);
  const outputs = useOutputs(batch);
  if (results.length === 0) return <p class="muted">No machine is in this state.</p>;
  return (
    <>
      <ul class="batch-cards" aria-label="Machines">
        {results.slice(0, most).map((result) => (
          <Card key={result.id} result={result} parts={outputs.get(result.id)?.parts} />
        ))}
      </ul>
      <More count={most} of={results.length} more={() => setMost(most * 2)} />
    </>
  );
}

function Card({ result, parts }: { result: Result; parts: Output['parts'] | undefined }) {
  const { id, machine_id, status, duration, started_at, reason, stdout, stderr } = result;
  const runs = status === 'running' && started_at !== null;
  const ms = runs ? Math.max(0, clock.value - Date.parse(started_at)) : duration;
  return (
    <li class="card batch-card">
      <header>
        <a href={to('/commands', id)} class="cut">
          {nameOf(machine_id)}
        </a>
        <span class="muted">{outcome(result)}</span>
        <span class="muted number">{ms === null ? '' : durationText(ms)}</span>
        <State of={status} />
      </header>
      <section class="batch-output" aria-label={`Output of ${nameOf(machine_id)}`} tabIndex={0}>
        {parts ? (
          <OutputText parts={parts} />
        ) : (
          <pre>{stdout || stderr || (reason && reasonText(reason))}</pre>
        )}
      </section>
    </li>
  );
}

// The page of one command: both outputs while the command writes them, its result, and buttons for actions.
import { useEffect, useReducer, useRef, useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { type CommandRecord, commandLine, outcome, runAgain } from '../commands/command-list.tsx';
import { followOutput, Output, OutputText } from '../commands/output-text.tsx';
import { reasonText } from '../commands/reason-text.ts';
import { bytesText, durationText } from '../format-times-and-sizes.ts';
import { listen, useTopic } from '../live-updates.ts';
import { may } from '../login-state.ts';
import { nameOf } from '../machines/names.tsx';
import { CancelButton } from '../parts/action-buttons.tsx';
import { Button, ButtonLink } from '../parts/button.tsx';
import { TextField } from '../parts/form.tsx';
import * as icons from '../parts/icons.ts';
import { Failed, Show } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { Ago, Choice, CopyButton, Notice, State } from '../parts/small-components.tsx';
import { attempt, say } from '../parts/toasts.tsx';
import { useData } from '../parts/use-data.ts';
import { type Params, to } from '../router.ts';
import { clock } from '../timers.ts';

export function Command({ params: { command = '' } }: { params: Params }) {
  const loaded = useData(
    (signal) => client.commands.get({ command_id: command }, { signal }),
    [command],
    ({ data }) => data.command_id === command,
  );
  const { data, reload, replace } = loaded;
  useTopic(`commands:${command}`);
  useEffect(() => listen(({ command: changed }) => changed?.id === command && replace(changed)), [command]);
  return (
    <Page
      title="Command"
      above={[{ text: 'Commands', href: to('/commands') }]}
      beside={data && <State of={data.status} />}
      actions={data && <Actions command={data} reload={reload} />}
    >
      <Show of={loaded}>
        {(record) => (
          <>
            <section class="card command-card">
              <pre class="command-line">{commandLine(record)}</pre>
              <CopyButton text={commandLine(record)} />
              <CommandFacts command={record} />
            </section>
            {record.reason && <Notice>{reasonText(record.reason)}</Notice>}
            <OutputView key={command} command={record} ended={reload} />
            {record.status === 'running' && may('commands:execute') && <InputField command={command} />}
          </>
        )}
      </Show>
    </Page>
  );
}

const isOpen = ({ status }: CommandRecord): boolean => status === 'queued' || status === 'running';

function CommandFacts({ command }: { command: CommandRecord }) {
  const { machine_id, created_at, started_at, duration, user, cwd, schedule_id, batch_id } = command;
  const runs = started_at !== null && command.status === 'running';
  const ms = runs ? clock.value - Date.parse(started_at) : duration;
  const facts: readonly (readonly [name: string, value: preact.ComponentChildren])[] = [
    ['Machine', <a href={to('/machines', machine_id)}>{nameOf(machine_id)}</a>],
    ['Result', outcome(command)],
    ['Duration', ms === null ? '' : durationText(Math.max(0, ms))],
    ['Created', <Ago at={created_at} />],
    ['User', user],
    ['Folder', cwd],
    ['Schedule', schedule_id && <a href={to('/schedules', schedule_id)}>open</a>],
    ['Batch', batch_id && <a href={to('/batches', batch_id)}>open</a>],
  ];
  return (
    <dl class="fact-row">
      {facts.map(
        ([name, value]) =>
          value && (
            <div key={name}>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </div>
          ),
      )}
    </dl>
  );
}

function Actions({ command, reload }: { command: CommandRecord; reload: () => void }) {
  if (!may('commands:execute')) return null;
  if (!isOpen(command)) {
    return <ButtonLink icon={icons.refresh} text="Run again" href={runAgain(command, command.machine_id)} />;
  }
  return (
    <>
      <Button
        text="Interrupt"
        disabled={command.status !== 'running'}
        press={() =>
          void attempt(
            () => client.commands.signal({ command_id: command.id, signal: 'SIGINT' }),
            'SIGINT is sent',
          )
        }
      />
      <CancelButton
        what="command"
        text="All its processes get SIGTERM, and SIGKILL 10 seconds later."
        run={() => client.commands.cancel({ command_id: command.id }).then(reload)}
      />
    </>
  );
}

const views = [
  ['both', 'Both'],
  ['stdout', 'Output'],
  ['stderr', 'Errors'],
] as const;

/** The output of a command, drawn while it arrives. */
function useOutput(id: string, ended: () => void) {
  const output = useRef(new Output());
  const [, draw] = useReducer((count: number, _: undefined) => count + 1, 0);
  const [error, setError] = useState<unknown>(undefined);
  const [over, setOver] = useState(false);
  useEffect(() => {
    const stop = new AbortController();
    followOutput(id, output.current, stop.signal, () => draw(undefined)).then(
      () => {
        if (stop.signal.aborted) return;
        setOver(true);
        ended();
      },
      (reason: unknown) => setError(reason),
    );
    return () => stop.abort();
  }, [id]);
  return { output: output.current, error, over };
}

function OutputView({ command, ended }: { command: CommandRecord; ended: () => void }) {
  const { output, error, over } = useOutput(command.id, ended);
  const [view, setView] = useState<(typeof views)[number][0]>('both');
  const end = useRef<HTMLElement>(null);
  const stays = useRef(true);
  useEffect(() => {
    const element = end.current;
    if (element && stays.current) element.scrollTop = element.scrollHeight;
  }, [output.parts]);
  const parts = output.parts.filter(({ stream }) => view === 'both' || stream === view);
  const hasErrors = view !== 'stdout' && parts.some(({ stream }) => stream === 'stderr');
  /**
   * Scrolls to the next piece of standard error. After the last piece, scrolls to the first one again.
   */
  const nextError = (): void => {
    const element = end.current;
    if (!element) return;
    const errors = [...element.querySelectorAll<HTMLElement>('.stderr')];
    const top = element.scrollTop + 1;
    const next = errors.find(({ offsetTop }) => offsetTop > top) ?? errors[0];
    stays.current = false;
    if (next) element.scrollTop = next.offsetTop;
  };
  if (error !== undefined) return <Failed error={error} />;
  return (
    <section class="card output">
      <div class="card-head spread">
        <Choice label="Outputs" options={views} value={view} choose={setView} />
        <span class="output-links">
          {hasErrors && <Button icon={icons.down} text="Next error" press={nextError} />}
          <Downloads command={command} />
        </span>
      </div>
      <section
        class="output-text"
        aria-label="Output"
        tabIndex={0}
        ref={end}
        onScroll={({ currentTarget: { scrollTop, scrollHeight, clientHeight } }) => {
          stays.current = scrollHeight - scrollTop - clientHeight < 40;
        }}
      >
        {output.cut && (
          <p class="muted">The beginning is left out here; the download has everything that is stored.</p>
        )}
        <OutputText parts={parts} />
        {parts.length === 0 && (
          <p class="muted">{over ? 'The command wrote no output.' : 'No output yet.'}</p>
        )}
      </section>
    </section>
  );
}

function Downloads({ command }: { command: CommandRecord }) {
  return (['stdout', 'stderr'] as const).map((stream) => {
    const bytes = command[`${stream}_bytes`];
    const address = `/api/v1/commands/${encodeURIComponent(command.id)}/output?stream=${stream}`;
    return (
      bytes > 0 && (
        <ButtonLink
          key={stream}
          icon={icons.download}
          text={`${stream}, ${bytesText(bytes)}`}
          href={address}
          download={`${command.id}.${stream}.txt`}
        />
      )
    );
  });
}

/**
 * A field that writes lines to the standard input of a command. The command must have been started with open
 * input.
 */
function InputField({ command }: { command: string }) {
  const [text, setText] = useState('');
  const send = async (end: boolean): Promise<void> => {
    const sent = await attempt(() =>
      client.commands.input({ command_id: command, data: end ? '' : `${text}\n`, end }),
    );
    if (!sent) return;
    setText('');
    if (end) say('The input is closed');
  };
  return (
    <details>
      <summary>Write to the command’s input</summary>
      <form
        class="input-line"
        onSubmit={(event) => {
          event.preventDefault();
          void send(false);
        }}
      >
        <TextField
          label="Line"
          value={text}
          change={setText}
          mono
          hint="Works only if the command was started with its input left open"
        />
        <button type="submit">Send</button>
        <Button text="Close the input" press={() => void send(true)} />
      </form>
    </details>
  );
}

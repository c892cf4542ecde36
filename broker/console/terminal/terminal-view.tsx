// One open terminal: the emulator, a toolbar with search and copy, and the state of the connection.
import { useEffect, useRef, useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { may } from '../login-state.ts';
import { Button, IconButton } from '../parts/button.tsx';
import * as icons from '../parts/icons.ts';
import { State } from '../parts/small-components.tsx';
import { attempt, say, sayError } from '../parts/toasts.tsx';
import { place, setQuery } from '../router.ts';
import { isDark } from '../theme.ts';
import { keepAttached, type Mode, type Phase } from './attach.ts';
import { Participants } from './participants.tsx';
import { TouchKeys } from './touch-keys.tsx';
import { createEmulator, type Emulator } from './xterm-setup.ts';

const phaseTexts = {
  connecting: ['pending', 'connecting'],
  connected: ['online', 'connected'],
  offline: ['GRACE_PERIOD', 'machine offline'],
  lost: ['GRACE_PERIOD', 'connection lost'],
  behind: ['GRACE_PERIOD', 'connection lost'],
  ended: ['ended', 'ended'],
} as const;

/** Attaches a new emulator to a session for as long as the element is on the page. */
function useTerminal(session: string, mode: Mode) {
  const element = useRef<HTMLDivElement>(null);
  const [emulator, setEmulator] = useState<Emulator | undefined>(undefined);
  const [phase, setPhase] = useState<Phase>({ name: 'connecting' });
  useEffect(() => {
    if (!element.current) return undefined;
    const stop = new AbortController();
    const opened = createEmulator(element.current, isDark());
    opened.terminal.focus();
    setEmulator(opened);
    const sizes = new ResizeObserver(() => opened.fit());
    // Only an operator's window decides the size of the terminal. keepAttached() gives that size to observers.
    if (mode === 'operator') sizes.observe(element.current);
    keepAttached({ session, mode, emulator: opened, signal: stop.signal, onPhase: setPhase }).catch(sayError);
    return () => {
      stop.abort();
      sizes.disconnect();
      opened.terminal.dispose();
    };
  }, [session, mode]);
  const dark = isDark();
  useEffect(() => emulator?.paint(dark), [emulator, dark]);
  return { element, emulator, phase };
}

export function TerminalView({ session, reload }: { session: string; reload: () => void }) {
  const mode: Mode =
    place.value.query.get('observe') === null && may('sessions:attach') ? 'operator' : 'observer';
  const { element, emulator, phase } = useTerminal(session, mode);
  const [searching, setSearching] = useState(false);
  const [state, text] = phaseTexts[phase.name];
  const onKey = (event: KeyboardEvent): void => {
    if (!event.ctrlKey || !event.shiftKey) return;
    const key = event.key.toLowerCase();
    if (key === 'f') setSearching(true);
    else if (key === 'c' && emulator) void copySelection(emulator);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <div class="terminal-frame" onKeyDownCapture={onKey}>
      <div class="terminal-bar">
        <State of={state} text={text} />
        {mode === 'observer' && <span class="tag">only watching</span>}
        <Participants session={session} own={phase.name === 'connected' ? phase.client : undefined} />
        <Tools
          session={session}
          emulator={emulator}
          search={() => setSearching(!searching)}
          reload={reload}
        />
      </div>
      {searching && emulator && <SearchBar emulator={emulator} close={() => setSearching(false)} />}
      {'text' in phase && (
        <p class={phase.name === 'ended' ? 'notice' : 'notice warn'} role="status">
          <span>{phase.text}</span>
        </p>
      )}
      <div class="screen" ref={element} />
      {mode === 'operator' && <TouchKeys emulator={emulator} />}
    </div>
  );
}

async function copySelection({ terminal }: Emulator): Promise<void> {
  const text = terminal.getSelection();
  if (text === '') return say('Select text first, then copy');
  await attempt(() => navigator.clipboard.writeText(text), 'Copied');
}

interface ToolsProps {
  session: string;
  emulator: Emulator | undefined;
  search: () => void;
  reload: () => void;
}

function Tools({ session, emulator, search, reload }: ToolsProps) {
  const end = (): Promise<boolean> =>
    attempt(async () => {
      await client.sessions.end({ session_id: session });
      reload();
    });
  const share = (): Promise<boolean> =>
    attempt(
      () => navigator.clipboard.writeText(`${location.origin}${location.pathname}?observe`),
      'The link is copied. Users whose key has the scope sessions:attach can open it to watch this terminal',
    );
  const watching = place.value.query.get('observe') !== null;
  return (
    <span class="tools">
      {watching && may('sessions:attach') && (
        <Button text="Type, too" class="quiet" press={() => setQuery({ observe: '' })} />
      )}
      <IconButton icon={icons.search} label="Search" title="Search (Ctrl Shift F)" press={search} />
      <IconButton
        icon={icons.copy}
        label="Copy selection"
        title="Copy selection (Ctrl Shift C)"
        press={() => emulator && void copySelection(emulator)}
      />
      <ReadAloud emulator={emulator} />
      <Button
        text="Share"
        class="quiet"
        title="Copy a link with which others can watch this terminal"
        press={() => void share()}
      />
      {may('sessions:attach') && <Button text="End" class="quiet danger" press={() => void end()} />}
    </span>
  );
}

function SearchBar({ emulator, close }: { emulator: Emulator; close: () => void }) {
  const [text, setText] = useState('');
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => {
    field.current?.focus();
    return () => {
      emulator.search.clearDecorations();
      emulator.terminal.focus();
    };
  }, [emulator]);
  const find = (backwards: boolean): void => {
    if (backwards) emulator.search.findPrevious(text);
    else emulator.search.findNext(text);
  };
  return (
    <search class="terminal-search">
      <input
        ref={field}
        type="search"
        aria-label="Search in the terminal"
        placeholder="Search; Enter finds the previous match"
        value={text}
        onInput={({ currentTarget }) => {
          setText(currentTarget.value);
          emulator.search.findPrevious(currentTarget.value, { incremental: true });
        }}
        onKeyDown={(event) => {
          if (event.key === 'Enter') find(!event.shiftKey);
          if (event.key === 'Escape') close();
        }}
      />
      <IconButton icon={icons.arrowUp} label="Find the previous match" press={() => find(true)} />
      <IconButton icon={icons.down} label="Find the next match" press={() => find(false)} />
      <IconButton icon={icons.close} label="Close the search" press={close} />
    </search>
  );
}

function ReadAloud({ emulator }: { emulator: Emulator | undefined }) {
  const [aloud, setAloud] = useState(false);
  useEffect(() => emulator?.readAloud(aloud), [emulator, aloud]);
  return (
    <IconButton
      icon={icons.speech}
      label="For screen readers"
      aria-pressed={aloud}
      title={aloud ? 'Output is readable for screen readers' : 'Make the output readable for screen readers'}
      press={() => setAloud(!aloud)}
    />
  );
}

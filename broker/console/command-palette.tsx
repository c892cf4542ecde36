// The command palette: finds pages, machines and actions by a few typed letters.
import { signal } from '@preact/signals';
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from 'preact/hooks';
import { client } from './api-client.ts';
import { logOut, may } from './login-session.ts';
import { menu } from './navigation-menu.ts';
import { Icon, type IconNodes } from './parts/icon.tsx';
import * as icons from './parts/icons.ts';
import { sayError } from './parts/toasts.tsx';
import { go, to } from './router.ts';
import { chooseTheme, isDark } from './theme.ts';
import { after } from './time.ts';

export const paletteOpen = signal(false);

interface Found {
  id: string;
  text: string;
  hint: string;
  icon: IconNodes;
  run: () => void;
}

const typingMs = 120;
const mostMachines = 8;

function actions(): Found[] {
  const dark = isDark();
  return [
    ...menu.value.map(({ pattern, text, icon, key }) => ({
      id: pattern,
      text,
      hint: `g ${key}`,
      icon,
      run: () => go(to(pattern)),
    })),
    {
      id: 'profile',
      text: 'Profile and shortcuts',
      hint: '?',
      icon: icons.profile,
      run: () => go(to('/profile')),
    },
    {
      id: 'theme',
      text: dark ? 'Light theme' : 'Dark theme',
      hint: '',
      icon: dark ? icons.sun : icons.moon,
      run: () => chooseTheme(dark ? 'light' : 'dark'),
    },
    ...(may('schedules:write')
      ? [
          {
            id: 'new-schedule',
            text: 'New schedule',
            hint: '',
            icon: icons.join,
            run: () => go(to('/schedules', 'new')),
          },
        ]
      : []),
    { id: 'docs', text: 'API reference', hint: '', icon: icons.docs, run: () => location.assign('/docs') },
    { id: 'out', text: 'Log out', hint: '', icon: icons.logOut, run: () => void logOut().catch(sayError) },
  ];
}

/** Finds the machines whose name contains the text. The search begins once the user stops typing. */
function useMachines(text: string): Found[] {
  const [found, setFound] = useState<Found[]>([]);
  useEffect(() => {
    if (!may('machines:read')) return undefined;
    const stop = new AbortController();
    const cancel = after(typingMs, () => {
      client.machines
        .list({ limit: mostMachines, sort: 'name', ...(text && { search: text }) }, { signal: stop.signal })
        .then(
          ({ items }) =>
            setFound(
              items.map(({ id, name, status }) => ({
                id,
                text: name,
                hint: status,
                icon: icons.machines,
                run: () => go(to('/machines', id)),
              })),
            ),
          () => {},
        );
    });
    return () => {
      cancel();
      stop.abort();
    };
  }, [text]);
  // `found` has the machines of the previous text until the answer arrives. The filter keeps Enter from choosing a
  // machine that does not match the new text.
  const letters = text.toLowerCase();
  return found.filter((one) => one.text.toLowerCase().includes(letters));
}

export function Palette() {
  return paletteOpen.value ? <PaletteDialog /> : null;
}

/** Opens a modal dialog, and returns the focus to the previous element when the dialog closes. */
function useModal() {
  const element = useRef<HTMLDialogElement>(null);
  // A layout effect runs before the next paint, so that the dialog receives the first letter that the user types.
  useLayoutEffect(() => {
    const before = document.activeElement;
    element.current?.showModal();
    return () => {
      if (before instanceof HTMLElement) before.focus();
    };
  }, []);
  return element;
}

function PaletteDialog() {
  const [text, setText] = useState('');
  const [at, setAt] = useState(0);
  const element = useModal();
  const machines = useMachines(text);
  const all = useMemo(() => {
    const letters = text.toLowerCase();
    return [...actions().filter((one) => one.text.toLowerCase().includes(letters)), ...machines];
  }, [text, machines]);
  const close = (): void => {
    paletteOpen.value = false;
  };
  const choose = (found: Found | undefined): void => {
    if (!found) return;
    close();
    found.run();
  };
  const onKey = (event: KeyboardEvent): void => {
    const step = event.key === 'ArrowDown' ? 1 : event.key === 'ArrowUp' ? -1 : 0;
    if (step !== 0) setAt((at + step + all.length) % Math.max(1, all.length));
    if (event.key === 'Enter') choose(all[at]);
    if (step !== 0 || event.key === 'Enter') event.preventDefault();
  };
  return (
    <dialog
      ref={element}
      class="palette"
      aria-label="Search"
      onCancel={close}
      onMouseDown={(event) => event.target === element.current && close()}
    >
      <input
        type="search"
        role="combobox"
        list={undefined}
        aria-label="Search pages, machines and actions"
        aria-expanded="true"
        aria-controls="found"
        aria-activedescendant={all[at] && `found-${at}`}
        placeholder="Search pages, machines and actions"
        autoComplete="off"
        spellcheck={false}
        value={text}
        onInput={({ currentTarget }) => {
          setText(currentTarget.value);
          setAt(0);
        }}
        onKeyDown={onKey}
      />
      <FoundList all={all} at={at} choose={choose} hover={setAt} />
    </dialog>
  );
}

interface FoundListProps {
  all: readonly Found[];
  at: number;
  choose: (found: Found) => void;
  hover: (index: number) => void;
}

function FoundList({ all, at, choose, hover }: FoundListProps) {
  useEffect(() => {
    document.getElementById(`found-${at}`)?.scrollIntoView({ block: 'nearest' });
  }, [at]);
  if (all.length === 0) return <p class="muted palette-none">Nothing matches.</p>;
  return (
    <div id="found" role="listbox" aria-label="Found" tabIndex={-1}>
      {all.map((one, index) => (
        <div
          key={one.id}
          id={`found-${index}`}
          role="option"
          tabIndex={-1}
          aria-selected={index === at}
          onClick={() => choose(one)}
          onMouseMove={() => index !== at && hover(index)}
        >
          <Icon of={one.icon} />
          <span class="cut">{one.text}</span>
          <span class="muted">{one.hint}</span>
        </div>
      ))}
    </div>
  );
}

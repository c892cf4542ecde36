// The command palette: finds pages, machines and actions by a few typed letters.
import { signal } from '@preact/signals';
import { useEffect, useState } from 'preact/hooks';
import { logOut, may } from './login-state.ts';
import { useCurrent, useMachinesByName } from './machines/search-machines-by-name.ts';
import { menu } from './navigation-menu.ts';
import { Icon, type IconNodes } from './parts/icon.tsx';
import * as icons from './parts/icons.ts';
import { useModal } from './parts/small-components.tsx';
import { sayError } from './parts/toasts.tsx';
import { go, leaveFor, to } from './router.ts';
import { chooseTheme, isDark } from './theme.ts';

const paletteOpen = signal(false);
export const showPalette = (): void => {
  paletteOpen.value = true;
};

interface Found {
  id: string;
  text: string;
  hint?: string;
  icon: IconNodes;
  run: () => void;
}

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
      icon: dark ? icons.sun : icons.moon,
      run: () => chooseTheme(dark ? 'light' : 'dark'),
    },
    ...(may('schedules:write')
      ? [
          {
            id: 'new-schedule',
            text: 'New schedule',
            icon: icons.join,
            run: () => go(to('/schedules', 'new')),
          },
        ]
      : []),
    { id: 'docs', text: 'API reference', icon: icons.docs, run: () => location.assign('/docs') },
    {
      id: 'out',
      text: 'Log out',
      icon: icons.logOut,
      run: () => leaveFor(() => void logOut().catch(sayError)),
    },
  ];
}

export function Palette() {
  return paletteOpen.value ? <PaletteDialog /> : null;
}

function PaletteDialog() {
  const [text, setText] = useState('');
  const element = useModal();
  const letters = text.toLowerCase();
  const all: Found[] = [
    ...actions().filter((one) => one.text.toLowerCase().includes(letters)),
    ...useMachinesByName(text).map(({ id, name, status }) => ({
      id,
      text: name,
      hint: status,
      icon: icons.machines,
      run: () => go(to('/machines', id)),
    })),
  ];
  const close = (): void => {
    paletteOpen.value = false;
  };
  const choose = (found: Found | undefined): void => {
    if (!found) return;
    close();
    found.run();
  };
  const { at, setAt, onKey } = useCurrent(all, choose);
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

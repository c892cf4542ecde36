// Dark or light: the system's choice, or the person's own, which is the only thing the console stores.
import { effect, signal } from '@preact/signals';

export const themes = ['system', 'light', 'dark'] as const;
export type Theme = (typeof themes)[number];
const stored = 'farhand-theme';
const system = matchMedia('(prefers-color-scheme: dark)');

function read(): Theme {
  try {
    const value = localStorage.getItem(stored);
    return themes.find((name) => name === value) ?? 'system';
  } catch {
    return 'system';
  }
}

export const theme = signal<Theme>(read());
const systemDark = signal(system.matches);
system.addEventListener('change', ({ matches }) => {
  systemDark.value = matches;
});

/** Whether the page is dark now; terminals and charts, whose colours are not of the style sheet, read it. */
export const isDark = (): boolean => (theme.value === 'system' ? systemDark.value : theme.value === 'dark');

export function chooseTheme(chosen: Theme): void {
  theme.value = chosen;
  try {
    localStorage.setItem(stored, chosen);
  } catch {
    // A browser may forbid storage; the choice then lasts until the page is closed.
  }
}

effect(() => {
  document.documentElement.dataset.theme = isDark() ? 'dark' : 'light';
});

// Dark or light: the system's choice, or the person's own, which the browser stores.
import { effect, signal } from '@preact/signals';
import { storedText, storeText } from './stored.ts';

export const themes = ['system', 'light', 'dark'] as const;
export type Theme = (typeof themes)[number];
const system = matchMedia('(prefers-color-scheme: dark)');

export const theme = signal<Theme>(themes.find((name) => name === storedText('theme')) ?? 'system');
const systemDark = signal(system.matches);
system.addEventListener('change', ({ matches }) => {
  systemDark.value = matches;
});

/** Whether the page is dark now; terminals and charts, whose colours are not of the style sheet, read it. */
export const isDark = (): boolean => (theme.value === 'system' ? systemDark.value : theme.value === 'dark');

export function chooseTheme(chosen: Theme): void {
  theme.value = chosen;
  storeText('theme', chosen);
}

effect(() => {
  document.documentElement.dataset.theme = isDark() ? 'dark' : 'light';
});

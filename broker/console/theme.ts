// The colour theme of the page: the theme of the system, or the theme that the user chose.
import { effect, signal } from '@preact/signals';
import { storedText, storeText } from './local-storage.ts';

export const themes = ['system', 'light', 'dark'] as const;
export type Theme = (typeof themes)[number];
const system = matchMedia('(prefers-color-scheme: dark)');

export const theme = signal<Theme>(themes.find((name) => name === storedText('theme')) ?? 'system');
const systemDark = signal(system.matches);
system.addEventListener('change', ({ matches }) => {
  systemDark.value = matches;
});

/**
 * True while the page is dark. Terminals and charts need it, because the style sheet does not set their
 * colours.
 */
export const isDark = (): boolean => (theme.value === 'system' ? systemDark.value : theme.value === 'dark');

export function chooseTheme(chosen: Theme): void {
  theme.value = chosen;
  storeText('theme', chosen);
}

effect(() => {
  document.documentElement.dataset.theme = isDark() ? 'dark' : 'light';
});

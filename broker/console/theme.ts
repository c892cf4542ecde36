// The colour theme of the page: the theme of the system, or the theme that the user chose.
import { effect, type Signal, signal } from '@preact/signals';
import { storedText, storeText } from './local-storage.ts';

export const themes = [
  ['system', 'System'],
  ['light', 'Light'],
  ['dark', 'Dark'],
] as const;
type Theme = (typeof themes)[number][0];

const stored = storedText('theme');
export const theme = signal<Theme>(themes.find(([name]) => name === stored)?.[0] ?? 'system');
const systemDark = mediaSignal('(prefers-color-scheme: dark)');

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

/** Returns a signal that is true while the media query matches. */
export function mediaSignal(query: string): Signal<boolean> {
  const media = matchMedia(query);
  const matches = signal(media.matches);
  media.addEventListener('change', () => {
    matches.value = media.matches;
  });
  return matches;
}

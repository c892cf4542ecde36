// Keyboard shortcuts of every page: the palette, the search of a page, and `g` followed by the key of a page.

import { showPalette } from './command-palette.tsx';
import { loggedIn } from './login-state.ts';
import { menu } from './navigation-menu.ts';
import { go, to } from './router.ts';
import { now } from './timers.ts';

/** Maximum number of milliseconds between `g` and the second key of a shortcut. */
const pairMs = 1_500;

const isTyping = (target: EventTarget | null): boolean =>
  target instanceof Element &&
  target.closest('input, textarea, select, [contenteditable], .xterm, dialog') !== null;

/** Handles shortcuts until the page is closed. */
export function listenForShortcuts(): void {
  let firstAt = 0;
  document.addEventListener('keydown', (event) => {
    if (!loggedIn.value) return;
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === 'k') {
      event.preventDefault();
      showPalette();
      return;
    }
    if (isTyping(event.target) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === '/') {
      const field = document.querySelector<HTMLInputElement>('main input[type=search]');
      if (field) event.preventDefault();
      field?.focus();
      return;
    }
    if (event.key === '?') {
      go(to('/profile'));
      return;
    }
    const page = now() - firstAt < pairMs ? menu.value.find(({ key }) => key === event.key) : undefined;
    firstAt = event.key === 'g' ? now() : 0;
    if (page) {
      event.preventDefault();
      go(to(page.pattern));
    }
  });
}

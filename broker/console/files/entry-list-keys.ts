// Keyboard handling in the list of entries: arrow keys move the focus, Backspace opens the parent folder, and other
// keys do what the buttons do.
import { goToPath, parentOf } from './paths.ts';

export interface EntryActions {
  toggle: (index: number) => unknown;
  rename: (index: number) => unknown;
  remove: (index: number) => unknown;
}

const isName = (element: Element | null): element is HTMLElement =>
  element instanceof HTMLElement && element.dataset.entry !== undefined;

const namesIn = (list: Element): HTMLElement[] => [...list.querySelectorAll('[data-entry]')].filter(isName);

/**
 * Focuses the first name of a list if nothing else has the focus, for example after the previous folder's list was
 * removed. Focus on `main` counts as none: in Safari, a click on a button focuses `main` instead of the button.
 */
export function focusFirst(list: Element | null): void {
  if (list && document.activeElement?.matches('body, main')) namesIn(list)[0]?.focus();
}

/** Handles a key pressed on a name. Keys without an action here keep their usual effect. */
export function onEntryKey(event: KeyboardEvent, folder: string, actions: EntryActions): void {
  const { currentTarget: list, target, key } = event;
  if (!(list instanceof Element) || !(target instanceof Element) || !isName(target)) return;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const names = namesIn(list);
  const at = names.indexOf(target);
  const index = Number(target.dataset.entry);
  const moves: Readonly<Record<string, number>> = {
    ArrowDown: at + 1,
    ArrowUp: at - 1,
    Home: 0,
    End: names.length - 1,
  };
  const next = moves[key];
  if (next !== undefined) names[Math.min(Math.max(0, next), names.length - 1)]?.focus();
  else if (key === 'Backspace') goToPath({ path: parentOf(folder) });
  else if (key === ' ') actions.toggle(index);
  else if (key === 'F2') actions.rename(index);
  else if (key === 'Delete') actions.remove(index);
  else return;
  event.preventDefault();
}

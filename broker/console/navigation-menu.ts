// The items of the navigation menu. pages.tsx sets them at start; the menu, the palette and the profile display them.
import { computed, signal } from '@preact/signals';
import type { Scope } from '../../shared/api/route.ts';
import { hasOthers, may } from './login-state.ts';
import type { IconNodes } from './parts/icon.tsx';

export interface MenuItem {
  group: 'Fleet' | 'Work' | 'Watch' | 'Access';
  text: string;
  icon: IconNodes;
  /** The second key of the page's shortcut, pressed after `g`. */
  key: string;
  pattern: string;
  needs: Scope | undefined;
  /** True if the menu contains the item only while several brokers share a database. */
  needsOthers?: boolean;
}

export const allItems = signal<readonly MenuItem[]>([]);

/** The items of the pages that the login may use. */
export const menu = computed(() =>
  allItems.value.filter(
    ({ needs, needsOthers }) =>
      (needs === undefined || may(needs)) && (needsOthers !== true || hasOthers.value),
  ),
);

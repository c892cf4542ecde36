// The table of pages: the path of each, its place in the menu, and the scope it needs.
import type { Scope } from '../../shared/api/route.ts';
import { allItems, type MenuItem } from './navigation-menu.ts';
import { Machines } from './pages/machines.tsx';
import type { IconNodes } from './parts/icon.tsx';
import * as icons from './parts/icons.ts';
import { later } from './parts/lazy-component.tsx';
import type { Page } from './router.ts';

type Menu = readonly [
  group: MenuItem['group'],
  text: string,
  icon: IconNodes,
  key: string,
  needsOthers?: true,
];

const otherPages = () => import('./pages/pages-loaded-later.ts');
type OtherPage = keyof Awaited<ReturnType<typeof otherPages>>;

/**
 * An entry of the table. `page` is a component, or the name of a page in the script pages-loaded-later.ts, which is
 * loaded when a user first opens one of its pages.
 */
const entry = (pattern: string, page: Page | OtherPage, needs?: Scope, menu?: Menu) => ({
  pattern,
  page: typeof page === 'string' ? later(async () => (await otherPages())[page]) : page,
  needs,
  menu,
});

export const pages = [
  entry('/machines', Machines, 'machines:read', ['Fleet', 'Machines', icons.machines, 'm']),
  entry('/machines/:machine/:tab?/:item?', 'Machine', 'machines:read'),
  entry('/inventory', 'Inventory', 'machines:read', ['Fleet', 'Inventory', icons.inventory, 'i']),
  entry('/run', 'Run', 'commands:execute', ['Work', 'Run', icons.play, 'r']),
  entry('/commands', 'Commands', 'commands:read', ['Work', 'Commands', icons.command, 'c']),
  entry('/commands/:command', 'Command', 'commands:read'),
  entry('/batches', 'Batches', 'commands:read', ['Work', 'Batches', icons.batches, 'b']),
  entry('/batches/:batch', 'Batch', 'commands:read'),
  entry('/saved-commands', 'SavedCommands', 'commands:read', ['Work', 'Saved commands', icons.saved, 'v']),
  entry('/saved-commands/:saved/:tab?', 'SavedCommandPage', 'commands:read'),
  entry('/upgrades', 'Upgrades', 'machines:read', ['Fleet', 'Upgrades', icons.upgrades, 'u']),
  entry('/upgrades/:upgrade', 'UpgradePage', 'machines:read'),
  entry('/join', 'Join', 'admin', ['Fleet', 'Join a machine', icons.join, 'j']),
  entry('/brokers', 'Brokers', 'admin', ['Fleet', 'Brokers', icons.brokers, 'o', true]),
  entry('/schedules', 'Schedules', 'schedules:read', ['Work', 'Schedules', icons.schedules, 's']),
  entry('/schedules/:schedule/:tab?', 'Schedule', 'schedules:read'),
  entry('/alerts', 'Alerts', 'machines:read', ['Watch', 'Alerts', icons.alerts, 'l']),
  entry('/alerts/:tab', 'Alerts', 'machines:read'),
  entry('/alerts/channels/:channel', 'AlertChannel', 'webhooks:read'),
  entry('/events', 'Events', 'machines:read', ['Watch', 'Events', icons.events, 'e']),
  entry('/webhooks', 'Webhooks', 'webhooks:read', ['Watch', 'Webhooks', icons.webhooks, 'w']),
  entry('/webhooks/:webhook', 'Webhook', 'webhooks:read'),
  entry('/audit', 'Audit', 'admin', ['Watch', 'Audit log', icons.audit, 'a']),
  entry('/keys', 'Keys', 'admin', ['Access', 'API keys', icons.key, 'k']),
  entry('/profile', 'Profile'),
];

allItems.value = pages.flatMap(({ menu, needs, pattern }) => {
  if (!menu) return [];
  const [group, text, icon, key, needsOthers = false] = menu;
  return [{ group, text, icon, key, needsOthers, needs, pattern }];
});

// The table of pages: the path of each, its place in the menu, and the scope it needs.
import type { Scope } from '../../shared/api/route.ts';
import { allItems, type MenuItem } from './navigation-menu.ts';
import { Machines } from './pages/machines.tsx';
import type { IconNodes } from './parts/icon.tsx';
import * as icons from './parts/icons.ts';
import { later } from './parts/lazy-page.tsx';
import type { Page } from './router.ts';

interface Entry {
  pattern: string;
  page: Page;
  needs?: Scope;
  menu?: Pick<MenuItem, 'group' | 'text' | 'icon' | 'key' | 'needsOthers'>;
}

const otherPages = () => import('./pages/pages-loaded-later.ts');
/** Makes a page that is loaded when a user opens it. One script contains all pages except Machines. */
const otherPage = (name: keyof Awaited<ReturnType<typeof otherPages>>): Page =>
  later(async () => (await otherPages())[name]);

const item = (group: MenuItem['group'], text: string, icon: IconNodes, key: string) => ({
  group,
  text,
  icon,
  key,
});

export const pages: readonly Entry[] = [
  {
    pattern: '/machines',
    page: Machines,
    needs: 'machines:read',
    menu: item('Fleet', 'Machines', icons.machines, 'm'),
  },
  {
    pattern: '/machines/:machine/:tab?/:item?',
    page: otherPage('Machine'),
    needs: 'machines:read',
  },
  {
    pattern: '/inventory',
    page: otherPage('Inventory'),
    needs: 'machines:read',
    menu: item('Fleet', 'Inventory', icons.inventory, 'i'),
  },
  {
    pattern: '/run',
    page: otherPage('Run'),
    needs: 'commands:execute',
    menu: item('Work', 'Run', icons.play, 'r'),
  },
  {
    pattern: '/commands',
    page: otherPage('Commands'),
    needs: 'commands:read',
    menu: item('Work', 'Commands', icons.command, 'c'),
  },
  {
    pattern: '/commands/:command',
    page: otherPage('Command'),
    needs: 'commands:read',
  },
  {
    pattern: '/batches',
    page: otherPage('Batches'),
    needs: 'commands:read',
    menu: item('Work', 'Batches', icons.batches, 'b'),
  },
  {
    pattern: '/batches/:batch',
    page: otherPage('Batch'),
    needs: 'commands:read',
  },
  {
    pattern: '/saved-commands',
    page: otherPage('SavedCommands'),
    needs: 'commands:read',
    menu: item('Work', 'Saved commands', icons.saved, 'v'),
  },
  {
    pattern: '/saved-commands/:saved/:tab?',
    page: otherPage('SavedCommandPage'),
    needs: 'commands:read',
  },
  {
    pattern: '/upgrades',
    page: otherPage('Upgrades'),
    needs: 'machines:read',
    menu: item('Fleet', 'Upgrades', icons.upgrades, 'u'),
  },
  {
    pattern: '/upgrades/:upgrade',
    page: otherPage('UpgradePage'),
    needs: 'machines:read',
  },
  {
    pattern: '/join',
    page: otherPage('Join'),
    needs: 'admin',
    menu: item('Fleet', 'Join a machine', icons.join, 'j'),
  },
  {
    pattern: '/brokers',
    page: otherPage('Brokers'),
    needs: 'admin',
    menu: { ...item('Fleet', 'Brokers', icons.brokers, 'o'), needsOthers: true },
  },
  {
    pattern: '/schedules',
    page: otherPage('Schedules'),
    needs: 'schedules:read',
    menu: item('Work', 'Schedules', icons.schedules, 's'),
  },
  {
    pattern: '/schedules/:schedule/:tab?',
    page: otherPage('Schedule'),
    needs: 'schedules:read',
  },
  {
    pattern: '/alerts',
    page: otherPage('Alerts'),
    needs: 'machines:read',
    menu: item('Watch', 'Alerts', icons.alerts, 'l'),
  },
  {
    pattern: '/alerts/:tab',
    page: otherPage('Alerts'),
    needs: 'machines:read',
  },
  {
    pattern: '/alerts/channels/:channel',
    page: otherPage('AlertChannel'),
    needs: 'webhooks:read',
  },
  {
    pattern: '/events',
    page: otherPage('Events'),
    needs: 'machines:read',
    menu: item('Watch', 'Events', icons.events, 'e'),
  },
  {
    pattern: '/webhooks',
    page: otherPage('Webhooks'),
    needs: 'webhooks:read',
    menu: item('Watch', 'Webhooks', icons.webhooks, 'w'),
  },
  {
    pattern: '/webhooks/:webhook',
    page: otherPage('Webhook'),
    needs: 'webhooks:read',
  },
  {
    pattern: '/audit',
    page: otherPage('Audit'),
    needs: 'admin',
    menu: item('Watch', 'Audit log', icons.audit, 'a'),
  },
  {
    pattern: '/keys',
    page: otherPage('Keys'),
    needs: 'admin',
    menu: item('Access', 'API keys', icons.key, 'k'),
  },
  {
    pattern: '/profile',
    page: otherPage('Profile'),
  },
];

allItems.value = pages.flatMap(({ menu, needs, pattern }) => (menu ? [{ ...menu, needs, pattern }] : []));

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
  menu?: Pick<MenuItem, 'group' | 'text' | 'icon' | 'key'>;
}

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
    page: later(async () => (await import('./pages/machine.tsx')).Machine),
    needs: 'machines:read',
  },
  {
    pattern: '/inventory',
    page: later(async () => (await import('./pages/inventory.tsx')).Inventory),
    needs: 'machines:read',
    menu: item('Fleet', 'Inventory', icons.inventory, 'i'),
  },
  {
    pattern: '/run',
    page: later(async () => (await import('./pages/run.tsx')).Run),
    needs: 'commands:execute',
    menu: item('Work', 'Run', icons.play, 'r'),
  },
  {
    pattern: '/commands',
    page: later(async () => (await import('./pages/commands.tsx')).Commands),
    needs: 'commands:read',
    menu: item('Work', 'Commands', icons.command, 'c'),
  },
  {
    pattern: '/commands/:command',
    page: later(async () => (await import('./pages/command.tsx')).Command),
    needs: 'commands:read',
  },
  {
    pattern: '/batches',
    page: later(async () => (await import('./pages/batches.tsx')).Batches),
    needs: 'commands:read',
    menu: item('Work', 'Batches', icons.batches, 'b'),
  },
  {
    pattern: '/batches/:batch',
    page: later(async () => (await import('./pages/batch.tsx')).Batch),
    needs: 'commands:read',
  },
  {
    pattern: '/join',
    page: later(async () => (await import('./pages/join.tsx')).Join),
    needs: 'admin',
    menu: item('Fleet', 'Join a machine', icons.join, 'j'),
  },
  {
    pattern: '/schedules',
    page: later(async () => (await import('./pages/schedules.tsx')).Schedules),
    needs: 'schedules:read',
    menu: item('Work', 'Schedules', icons.schedules, 's'),
  },
  {
    pattern: '/schedules/:schedule/:tab?',
    page: later(async () => (await import('./pages/schedule.tsx')).Schedule),
    needs: 'schedules:read',
  },
  {
    pattern: '/events',
    page: later(async () => (await import('./pages/events.tsx')).Events),
    needs: 'machines:read',
    menu: item('Watch', 'Events', icons.events, 'e'),
  },
  {
    pattern: '/webhooks',
    page: later(async () => (await import('./pages/webhooks.tsx')).Webhooks),
    needs: 'webhooks:read',
    menu: item('Watch', 'Webhooks', icons.webhooks, 'w'),
  },
  {
    pattern: '/webhooks/:webhook',
    page: later(async () => (await import('./pages/webhook.tsx')).Webhook),
    needs: 'webhooks:read',
  },
  {
    pattern: '/audit',
    page: later(async () => (await import('./pages/audit.tsx')).Audit),
    needs: 'admin',
    menu: item('Watch', 'Audit log', icons.audit, 'a'),
  },
  {
    pattern: '/keys',
    page: later(async () => (await import('./pages/keys.tsx')).Keys),
    needs: 'admin',
    menu: item('Access', 'API keys', icons.key, 'k'),
  },
  {
    pattern: '/profile',
    page: later(async () => (await import('./pages/profile.tsx')).Profile),
  },
];

allItems.value = pages.flatMap(({ menu, needs, pattern }) => (menu ? [{ ...menu, needs, pattern }] : []));

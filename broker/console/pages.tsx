// The table of pages: the path of each, its place in the menu, and the scope it needs.
import { type ComponentType, createElement } from 'preact';
import { useEffect, useState } from 'preact/hooks';
import type { Scope } from '../../shared/api/route.ts';
import { Machines } from './pages/machines.tsx';
import type { IconNodes } from './parts/icon.tsx';
import * as icons from './parts/icons.ts';
import { Failed, Placeholder } from './parts/page.tsx';
import type { Page, Params } from './routes.ts';

interface MenuItem {
  group: 'Fleet' | 'Work' | 'Watch' | 'Access';
  text: string;
  icon: IconNodes;
  /** The second key of its shortcut, after `g`. */
  key: string;
}

interface Entry {
  pattern: string;
  page: Page;
  needs?: Scope;
  menu?: MenuItem;
}

/** A page whose script is loaded when it is first opened. */
function later(load: () => Promise<Page>): Page {
  let loaded: Page | undefined;
  return function Later(props: { params: Params }) {
    const [page, setPage] = useState<{ of: Page } | undefined>(loaded && { of: loaded });
    const [error, setError] = useState<unknown>(undefined);
    useEffect(() => {
      if (page) return;
      load().then((arrived) => {
        loaded = arrived;
        setPage({ of: arrived });
      }, setError);
    }, [page]);
    if (error !== undefined) return <Failed error={error} retry={() => location.reload()} />;
    return page ? createElement(page.of as ComponentType<{ params: Params }>, props) : <Placeholder />;
  };
}

const item = (group: MenuItem['group'], text: string, icon: IconNodes, key: string): MenuItem => ({
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
];

/** Pages of the menu that a key with these scopes may use. */
export function menuOf(may: (scope: Scope) => boolean): (MenuItem & { pattern: string })[] {
  return pages.flatMap(({ menu, needs, pattern }) =>
    menu && (needs === undefined || may(needs)) ? [{ ...menu, pattern }] : [],
  );
}

export { later };

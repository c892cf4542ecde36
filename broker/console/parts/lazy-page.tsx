// Loads the script of a page or tab when it is first opened.
import { createElement } from 'preact';
import { useEffect, useState } from 'preact/hooks';
import type { Page, Params } from '../router.ts';
import { Failed, Placeholder } from './loading-failed-or-empty.tsx';

/** A page whose script is loaded when it is first opened. */
export function later(load: () => Promise<Page>): Page {
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
    return page ? createElement(page.of, props) : <Placeholder />;
  };
}

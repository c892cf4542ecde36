// The frame of every page: its heading, its links and its actions.
import type { ComponentChildren } from 'preact';
import { useEffect } from 'preact/hooks';

interface PageProps {
  title: string;
  /** Links to the pages above this one. */
  above?: readonly { text: string; href: string }[];
  /** Content beside the title. */
  beside?: ComponentChildren;
  actions?: ComponentChildren;
  /** True if the page has the height of the window, and its content scrolls by itself. */
  full?: boolean;
  children: ComponentChildren;
}

export function Page({ title, above = [], beside, actions, full = false, children }: PageProps) {
  useEffect(() => {
    document.title = `${title} · Farhand`;
  }, [title]);
  return (
    <div class={full ? 'page full' : 'page'}>
      <header class="page-head">
        <div class="page-title">
          {above.length > 0 && (
            <nav aria-label="Above" class="above">
              {above.map(({ text, href }) => (
                <a key={href} href={href}>
                  {text}
                </a>
              ))}
            </nav>
          )}
          <h1>
            <span class="cut">{title}</span>
            {beside}
          </h1>
        </div>
        {actions && <div class="actions">{actions}</div>}
      </header>
      {children}
    </div>
  );
}

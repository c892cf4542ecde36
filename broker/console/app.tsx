// The frame around every page: menu, banners, palette and toasts. Before a login it shows the login page.
import { useEffect, useState } from 'preact/hooks';
import { confirmation } from './api-client.ts';
import { Palette, showPalette } from './command-palette.tsx';
import { lost, startLive } from './live-updates.ts';
import { Login, Logo } from './login.tsx';
import { identify, loggedIn, logOut, may, me } from './login-state.ts';
import { menu } from './navigation-menu.ts';
import { pages } from './pages.tsx';
import { Button, IconButton } from './parts/button.tsx';
import { ConfirmLogin } from './parts/confirm-with-key.tsx';
import { Icon } from './parts/icon.tsx';
import * as icons from './parts/icons.ts';
import { Empty, Show } from './parts/loading-failed-or-empty.tsx';
import { MissingScope } from './parts/missing-scope.tsx';
import { Page } from './parts/page.tsx';
import { sayError, Toasts } from './parts/toasts.tsx';
import { useData } from './parts/use-data.ts';
import { go, leaveFor, match, path, to } from './router.ts';
import { chooseTheme, isDark } from './theme.ts';

export function App() {
  const identified = useData(
    async () => {
      if (me.value === undefined) await identify();
      return true;
    },
    [],
    null,
  );
  return (
    <>
      <Show of={identified}>{() => (loggedIn.value ? <Shell /> : <Login />)}</Show>
      <Toasts />
    </>
  );
}

function Shell() {
  const [menuOpen, setMenuOpen] = useState(false);
  const current = path.value;
  // Preact runs the effects of children first. So when this effect opens the stream of live updates, the page has
  // already added its topics.
  useEffect(startLive, []);
  useEffect(() => {
    setMenuOpen(false);
    if (current === '/') go(to('/machines'), { replace: true });
  }, [current]);
  return (
    <div class="shell">
      <a class="skip" href="#content">
        Skip to content
      </a>
      <header class="top">
        <IconButton
          icon={icons.menu}
          label="Menu"
          aria-expanded={menuOpen}
          size={20}
          press={() => setMenuOpen(!menuOpen)}
        />
        <Brand />
        <IconButton icon={icons.search} label="Search" size={18} press={showPalette} />
      </header>
      <Menu open={menuOpen} />
      {menuOpen && <div class="shade" aria-hidden="true" onClick={() => setMenuOpen(false)} />}
      <main id="content" tabIndex={-1}>
        <Banners />
        <CurrentPage />
      </main>
      <Palette />
      {confirmation.value && <ConfirmLogin />}
    </div>
  );
}

function Brand() {
  return (
    <a class="brand" href={to('/machines')}>
      <Logo size={22} />
      Farhand
    </a>
  );
}

function Menu({ open }: { open: boolean }) {
  const items = menu.value;
  const groups = [...new Set(items.map(({ group }) => group))];
  const within = (pattern: string): boolean => path.value === pattern || path.value.startsWith(`${pattern}/`);
  return (
    <aside class={open ? 'menu open' : 'menu'}>
      <Brand />
      <Button icon={icons.search} class="find" press={showPalette}>
        <span>Search</span>
        <kbd>Ctrl K</kbd>
      </Button>
      <nav aria-label="Pages">
        {groups.map((name) => (
          <section key={name}>
            <h2>{name}</h2>
            {items
              .filter(({ group }) => group === name)
              .map(({ text, icon, pattern }) => (
                <a key={pattern} href={to(pattern)} aria-current={within(pattern) ? 'page' : undefined}>
                  <Icon of={icon} />
                  {text}
                </a>
              ))}
          </section>
        ))}
      </nav>
      <MenuFoot />
    </aside>
  );
}

function MenuFoot() {
  const dark = isDark();
  return (
    <div class="menu-foot">
      <a href={to('/profile')} class="who" aria-current={path.value === '/profile' ? 'page' : undefined}>
        <Icon of={icons.profile} />
        <span class="cut">{me.value?.name}</span>
      </a>
      <IconButton
        icon={dark ? icons.sun : icons.moon}
        label={dark ? 'Light theme' : 'Dark theme'}
        press={() => chooseTheme(dark ? 'light' : 'dark')}
      />
      <IconButton
        icon={icons.logOut}
        label="Log out"
        press={() => leaveFor(() => void logOut().catch(sayError))}
      />
    </div>
  );
}

function Banners() {
  if (!lost.value) return null;
  return (
    <p class="notice warn banner" role="status">
      <Icon of={icons.warning} />
      <span>The broker does not answer. The page may be out of date until the connection is restored.</span>
    </p>
  );
}

function CurrentPage() {
  for (const { pattern, page: Current, needs } of pages) {
    const params = match(pattern, path.value);
    if (!params) continue;
    if (needs !== undefined && !may(needs)) {
      return (
        <Page title="Not allowed">
          <MissingScope scope={needs} />
        </Page>
      );
    }
    // The key contains the object's id, so Preact draws a new page for another object. The new page never has data or
    // buttons of the previous object.
    return <Current key={`${pattern} ${Object.values(params)[0] ?? ''}`} params={params} />;
  }
  return (
    <Page title="Not found">
      <Empty title="There is no such page">
        <p>
          Go to <a href={to('/machines')}>Machines</a>, or press <kbd>Ctrl K</kbd> to find a page.
        </p>
      </Empty>
    </Page>
  );
}

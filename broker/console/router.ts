// The router: the page's URL as a signal, links without a reload, and the page component of each path.
import { computed, signal } from '@preact/signals';
import type { ComponentType } from 'preact';

/** The path at which all pages begin. For every path below it the broker sends the same document. */
const base = '/console';

export type Params = Readonly<Record<string, string>>;
export type Page = ComponentType<{ params: Params }>;

interface Place {
  path: string;
  query: URLSearchParams;
}

const here = (): Place => ({
  path: location.pathname.slice(base.length) || '/',
  query: new URLSearchParams(location.search),
});

export const place = signal<Place>(here());
export const path = computed(() => place.value.path);

type Guard = (leave: () => void) => void;
let guard: Guard | undefined;
/**
 * The position of the displayed page in the history of the tab. Each entry of the history has its own position as its
 * state. An entry without a position is new: the user has changed the fragment in the address bar.
 */
let position = 0;
const positionHere = (): number => {
  const state: unknown = history.state;
  return typeof state === 'number' ? state : position;
};
position = positionHere();
history.replaceState(position, '');
/** The number of history steps that the guard has allowed, negative for steps back; 0 if it has allowed none. */
let agreed = 0;

/**
 * Makes `ask` decide whether the user may leave the page, for example while a text is not saved. To open the other
 * page, `ask` calls its argument. Call the returned function to remove this guard.
 */
export function guardLeaving(ask: Guard): () => void {
  guard = ask;
  return () => {
    if (guard === ask) guard = undefined;
  };
}

/**
 * Asks the guard whether the user may leave the page, and calls `leave` once the guard agrees. Returns false if there
 * is no guard; `leave` is then not called.
 */
function isGuarded(leave: () => void): boolean {
  const ask = guard;
  ask?.(leave);
  return ask !== undefined;
}

/** Calls `run`, which leaves the page. If there is a guard, calls `run` only once the guard agrees. */
export function leaveFor(run: () => void): void {
  if (!isGuarded(run)) run();
}

addEventListener('popstate', () => {
  // The browser has just added an entry after the displayed one, because the fragment in the address bar changed.
  if (typeof history.state !== 'number') {
    position += 1;
    history.replaceState(position, '');
    show();
    return;
  }
  const steps = positionHere() - position;
  const leave = (): void => {
    agreed = steps;
    history.go(steps);
  };
  // Back and Forward change the URL before the guard can be asked, so history.go() first returns to the displayed page.
  // pushState() is not used for this: it would remove the entries after the displayed page, which Forward opens.
  if (steps !== 0 && steps !== agreed && isGuarded(leave)) history.go(-steps);
  else show();
});

function show(): void {
  position = positionHere();
  agreed = 0;
  place.value = here();
}

/** Returns the path of a page for links. `to('/machines', id)` encodes the id. */
export function to(page: string, ...parts: readonly string[]): string {
  return base + [page, ...parts.map(encodeURIComponent)].join('/');
}

/** Opens the page at a path that `to` returned. */
export function go(address: string, { replace = false } = {}): void {
  leaveFor(() => {
    if (replace) history.replaceState(position, '', address);
    else history.pushState(position + 1, '', address);
    show();
    if (!replace) scrollTo(0, 0);
  });
}

/**
 * Changes parameters of the query. An empty value removes the parameter. With `push`, Back in the browser undoes the
 * change.
 */
export function setQuery(changes: Record<string, string>, { push = false } = {}): void {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value === '') query.delete(name);
    else query.set(name, value);
  }
  const text = query.toString();
  go(location.pathname + (text && `?${text}`), { replace: !push });
}

/**
 * Reads a choice from a parameter of the query, and returns it with a function that changes it. If the parameter
 * is missing, the choice is `byDefault`.
 */
export function choiceIn<T extends string>(
  name: string,
  options: readonly [readonly [T, string], ...(readonly [T, string])[]],
  byDefault: T = options[0][0],
): { options: typeof options; value: T; choose: (value: T) => void } {
  const given = place.value.query.get(name);
  const value = options.find(([option]) => option === given)?.[0] ?? byDefault;
  return { options, value, choose: (chosen) => setQuery({ [name]: chosen === byDefault ? '' : chosen }) };
}

/**
 * Opens links to pages of the console without loading a new document. A link to a part of the page only focuses that
 * part. The browser itself would also add an entry to the history. From that entry, Back would seem to do nothing.
 */
export function followLinks(): void {
  document.addEventListener('click', (event) => {
    const link = event.target instanceof Element ? event.target.closest('a') : null;
    const plain = event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
    if (!link || !plain || event.defaultPrevented || link.target || link.hasAttribute('download')) return;
    if (link.origin !== location.origin || !link.pathname.startsWith(`${base}/`)) return;
    event.preventDefault();
    if (link.hash) document.getElementById(link.hash.slice(1))?.focus();
    else go(link.pathname + link.search);
  });
}

/**
 * Returns the params of a path that matches a pattern such as `/machines/:machine/:tab?`. Returns undefined for
 * other paths.
 */
export function match(pattern: string, actual: string): Params | undefined {
  const wanted = pattern.split('/');
  const given = actual.replace(/\/$/, '').split('/');
  if (given.length > wanted.length) return undefined;
  const params: Record<string, string> = {};
  for (const [index, part] of wanted.entries()) {
    const value = given[index];
    if (!part.startsWith(':')) {
      if (part !== value) return undefined;
    } else if (value) params[part.replace(/[:?]/g, '')] = decoded(value);
    else if (!part.endsWith('?')) return undefined;
  }
  return params;
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

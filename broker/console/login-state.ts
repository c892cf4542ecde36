// Logs in with an API key or with the ticket in a link, logs out, and checks the rights of the key.
import { computed, effect, signal } from '@preact/signals';
import type { Scope } from '../../shared/api/route.ts';
import { client, clientWithKey, loginEnded, scopeRefusals } from './api-client.ts';

type Me = Awaited<ReturnType<typeof client.keys.me>>;

/** The key of this login; undefined while it is unknown, null if there is no login. */
export const me = signal<Me | null | undefined>(undefined);

/** True if other brokers share the broker's database. False while this is unknown, or if the key lacks admin. */
export const hasOthers = signal(false);

/**
 * True if the key has a scope. Pages use this to leave out what the broker would refuse. The broker itself still
 * checks every request.
 */
export function may(scope: Scope): boolean {
  const scopes = me.value?.scopes ?? [];
  return scopes.includes('admin') || scopes.includes(scope);
}

/** True while a user is logged in. Becomes false if the login ends while a page is open. */
export const loggedIn = computed(() => me.value !== null && me.value !== undefined && !loginEnded.value);

/**
 * Returns the login ticket in the URL, and removes it from there. Call this before the first request, so that no log
 * and no history contains the ticket.
 */
export function takeTicket(): string | undefined {
  const ticket = new URLSearchParams(location.hash.slice(1)).get('ticket') ?? undefined;
  if (location.hash) history.replaceState(history.state, '', location.pathname + location.search);
  return ticket;
}

/** Id of the key that was last logged in since this page was opened. */
let lastKey: string | undefined;

/** Loads the login from the broker. Rejects if the broker does not answer. */
export async function identify(): Promise<void> {
  try {
    const next = await client.keys.me();
    // A reload removes what this page has in memory of the key before, such as unsaved text and uploads. The promise
    // never resolves, so that the page displays nothing of it until then.
    if (lastKey !== undefined && lastKey !== next.id) {
      location.reload();
      return new Promise(() => {});
    }
    lastKey = next.id;
    me.value = next;
    loginEnded.value = false;
  } catch (error) {
    if (!loginEnded.value) throw error;
    me.value = null;
  }
}

/**
 * Loads the rights of the key again, because they may have changed. If the broker does not answer, the known rights
 * stay. An answer that arrives after a logout or a new login is ignored.
 */
export async function identifyAgain(): Promise<void> {
  // Without peek(), an effect that calls identifyAgain() would run again after each answer.
  const before = me.peek();
  const answer = await client.keys.me().catch(() => me.peek());
  if (me.value?.login?.id === before?.login?.id) me.value = answer;
}

effect(() => {
  if (scopeRefusals.value > 0) void identifyAgain();
});

const isAdmin = computed(() => may('admin'));
effect(() => {
  if (isAdmin.value) void findOthers();
});

/** Sets `hasOthers`. If the broker does not answer, the menu leaves out the page of brokers. */
async function findOthers(): Promise<void> {
  hasOthers.value = await client.brokers.list({ limit: 1 }).then(
    ({ total }) => total > 0,
    () => false,
  );
}

/** Returns a name for the list of logins, such as `Chrome on Linux`. */
function browserName(): string {
  const agent = navigator.userAgent;
  const browser = /Edg|Firefox|Chrome|Safari/.exec(agent)?.[0]?.replace('Edg', 'Edge') ?? 'Browser';
  const system = /Windows|Android|iPhone|iPad|Mac OS X|Linux/.exec(agent)?.[0];
  return system ? `${browser} on ${system}` : browser;
}

/** True if the browser has dropped the cookie of a login. Over plain http, Safari stores no secure cookie. */
export const cookieDropped = signal(false);

/** Logs in with an API key or a ticket. Rejects with the broker's reason. */
export async function logIn(secret: string): Promise<void> {
  await clientWithKey(secret).logins.create({ name: browserName() });
  await identify();
  cookieDropped.value = me.value === null;
}

export async function logOut(): Promise<void> {
  const login = me.value?.login;
  if (login) await client.logins.remove({ login_id: login.id });
  me.value = null;
}

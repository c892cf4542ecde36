// Entry point of the console: logs in if the URL contains a login ticket, then draws the page.
import { render } from 'preact';
import { App } from './app.tsx';
import { logIn, takeTicket } from './login-state.ts';
import { sayError } from './parts/toasts.tsx';
import { followLinks } from './router.ts';
import { listenForShortcuts } from './shortcuts.ts';

async function start(): Promise<void> {
  const ticket = takeTicket();
  if (ticket !== undefined) await logIn(ticket).catch(sayError);
  followLinks();
  listenForShortcuts();
  const root = document.getElementById('app');
  if (root) render(<App />, root);
}

void start();

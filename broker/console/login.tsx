// The login page. It exchanges an API key for a cookie, and does not store the key.
import { useState } from 'preact/hooks';
import { FarhandError, loginEnded } from './api-client.ts';
import { cookieDropped, logIn, me } from './login-state.ts';
import { Form, TextField } from './parts/form.tsx';
import { info } from './parts/icons.ts';
import { Notice } from './parts/small-components.tsx';

function refuse(error: unknown): never {
  // For the code `unauthorized`, users of this page get another text, because the broker's message is for programs that
  // send the key in a header.
  const isUnknown = error instanceof FarhandError && error.code === 'unauthorized';
  throw isUnknown
    ? new Error('The broker does not know this key, or the key was revoked or has expired.')
    : error;
}

export function Logo({ size }: { size: number }) {
  return (
    <svg class="logo" width={size} height={size} viewBox="0 0 32 32" aria-hidden="true">
      <rect width="32" height="32" rx="8" fill="currentColor" />
      <path d="M10 23V9h12M10 16h9" />
    </svg>
  );
}

export function Login() {
  const [key, setKey] = useState('');
  const submit = async (): Promise<void> => {
    await logIn(key.trim()).catch(refuse);
    setKey('');
  };
  return (
    <main class="login" id="content">
      <div class="card">
        <Logo size={40} />
        <h1>Farhand</h1>
        <p class="muted">
          {loginEnded.value && me.value
            ? 'Your login has ended. Log in again to go on.'
            : 'Log in with an API key.'}
        </p>
        <Form submit="Log in" run={submit} disabled={key.trim() === ''}>
          <TextField label="API key" secret value={key} change={setKey} required mono autoFocus />
        </Form>
        {cookieDropped.value && (
          <Notice icon={info}>
            This browser stores no secure cookie over plain http. Use https, or Chromium or Firefox on
            127.0.0.1.
          </Notice>
        )}
        <p class="muted small">
          No key yet? On the broker’s machine run{' '}
          <code>farhand auth create-key --name me --data-dir DIR</code>
        </p>
      </div>
    </main>
  );
}

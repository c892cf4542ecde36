// Asks for the API key again before a sensitive action, such as creating a key. This protects against a person who
// takes over an open browser tab.
import { useState } from 'preact/hooks';
import { clientWithKey, confirmation } from '../api-client.ts';
import { Form, TextField } from './form.tsx';
import { Dialog } from './small-components.tsx';

export function ConfirmLogin() {
  const [key, setKey] = useState('');
  const end = (done: boolean): void => confirmation.value?.resolve(done);
  return (
    <Dialog title="Enter your API key again" onClose={() => end(false)}>
      <Form
        submit="Continue"
        cancel={() => end(false)}
        disabled={key.trim() === ''}
        run={async () => {
          const login_id = confirmation.value?.loginId ?? '';
          await clientWithKey(key.trim()).logins.confirm({ login_id });
          end(true);
        }}
      >
        <p class="muted">
          This action needs your key again, because anyone could use this open tab. You are not asked again
          within the next 15 minutes.
        </p>
        <TextField label="API key" secret value={key} change={setKey} required mono autoFocus />
      </Form>
    </Dialog>
  );
}

// Asks for the API key again before an action that the thief of an open browser tab must not be able to do.
import { useState } from 'preact/hooks';
import { confirmation } from '../api-client.ts';
import { confirmLogin } from '../login-session.ts';
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
          await confirmLogin(confirmation.value?.loginId ?? '', key.trim());
          end(true);
        }}
      >
        <p class="muted">
          Enter your key again to create keys or join tokens, or to remove machines. You are not asked again
          for 15 minutes.
        </p>
        <TextField label="API key" secret value={key} change={setKey} required mono autoFocus />
      </Form>
    </Dialog>
  );
}

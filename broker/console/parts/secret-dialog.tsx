// A dialog that displays a new secret, which cannot be displayed again.
import { Button } from './button.tsx';
import { CopyButton, Dialog } from './small-components.tsx';

interface SecretProps {
  title: string;
  secret: string;
  close: () => void;
}

export function Secret({ title, secret, close }: SecretProps) {
  return (
    <Dialog title={title} onClose={close}>
      <p class="muted">Copy it now; it is not displayed again.</p>
      <OneLine text={secret} />
      <footer>
        <Button text="Done" class="primary" press={close} />
      </footer>
    </Dialog>
  );
}

/** A text with a button that copies it. */
export function OneLine({ text }: { text: string }) {
  return (
    <div class="secret">
      <pre>{text}</pre>
      <CopyButton text={text} />
    </div>
  );
}

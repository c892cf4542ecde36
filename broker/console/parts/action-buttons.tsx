// Buttons that several pages use: to create an object, to run a command, and to cancel or delete something after a
// confirmation.
import type { ComponentChildren } from 'preact';
import { useState } from 'preact/hooks';
import { may } from '../login-state.ts';
import { to } from '../router.ts';
import { Button, ButtonLink, IconButton } from './button.tsx';
import { join, play, stop, trash } from './icons.ts';
import { Confirm, type ConfirmProps } from './small-components.tsx';

interface NewButtonProps {
  text: string;
  /** True if the key may create the object. Otherwise the button is left out. */
  allowed?: boolean;
  /** The page that a click opens, or the function that it calls. */
  opens: string | (() => void);
}

export function NewButton({ text, allowed = true, opens }: NewButtonProps) {
  if (!allowed) return null;
  const shared = { icon: join, text, class: 'primary' };
  return typeof opens === 'string' ? (
    <ButtonLink {...shared} href={opens} />
  ) : (
    <Button {...shared} press={opens} />
  );
}

/** A link to the form that runs a command; `query` is the query of the link, such as `?machine=…`. */
export function RunButton({ query = '' }: { query?: string }) {
  if (!may('commands:execute')) return null;
  return <ButtonLink icon={play} text="Run a command" class="primary" href={to('/run') + query} />;
}

interface ConfirmButtonProps extends Omit<ConfirmProps, 'onClose'> {
  /** Draws the button. `ask` opens the dialog. */
  button: (ask: () => void) => ComponentChildren;
}

/** A button that does something after the user has confirmed it. */
export function ConfirmButton({ button, ...confirm }: ConfirmButtonProps) {
  const [asking, setAsking] = useState(false);
  return (
    <>
      {button(() => setAsking(true))}
      {asking && <Confirm {...confirm} onClose={() => setAsking(false)} />}
    </>
  );
}

interface CancelButtonProps {
  /** The kind of thing to cancel, such as `command`. */
  what: string;
  /** Text of the dialog that asks for confirmation: what cancelling does. */
  text: string;
  run: () => Promise<unknown>;
}

/** A button that cancels something that runs, after the user has confirmed it. */
export function CancelButton({ what, text, run }: CancelButtonProps) {
  return (
    <ConfirmButton
      button={(ask) => <Button icon={stop} text="Cancel" class="danger" press={ask} />}
      title={`Cancel this ${what}?`}
      action={`Cancel the ${what}`}
      run={run}
    >
      <p>{text}</p>
    </ConfirmButton>
  );
}

interface DeleteButtonProps extends Omit<ConfirmProps, 'onClose'> {
  label?: string;
  class?: string;
}

/** A button that deletes an object, after the user has confirmed it. */
export function DeleteButton({ label = 'Delete', class: name = 'danger', ...confirm }: DeleteButtonProps) {
  return (
    <ConfirmButton
      button={(ask) => <IconButton icon={trash} label={label} class={name} press={ask} />}
      {...confirm}
    />
  );
}

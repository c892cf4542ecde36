// Short messages in a corner of the page about successes and errors.
import { signal } from '@preact/signals';
import { messageOf } from '../api-client.ts';
import { after } from '../timers.ts';
import { IconButton } from './button.tsx';
import { Icon } from './icon.tsx';
import { check, close, warning } from './icons.ts';

interface Toast {
  id: number;
  text: string;
  isError: boolean;
}

const toasts = signal<readonly Toast[]>([]);
const stays = { done: 4_000, error: 12_000 };
let last = 0;

function add(text: string, isError: boolean): void {
  last += 1;
  const id = last;
  toasts.value = [...toasts.value.slice(-3), { id, text, isError }];
  after(isError ? stays.error : stays.done, () => remove(id));
}

function remove(id: number): void {
  toasts.value = toasts.value.filter((toast) => toast.id !== id);
}

export const say = (text: string): void => add(text, false);
export const sayError = (error: unknown): void => add(messageOf(error), true);

/** Runs the action of a button. Displays its error, or `done` if it succeeds. */
export async function attempt(action: () => Promise<unknown>, done?: string): Promise<boolean> {
  try {
    await action();
  } catch (error) {
    sayError(error);
    return false;
  }
  if (done !== undefined) say(done);
  return true;
}

export function Toasts() {
  return (
    <div class="toasts" role="status" aria-live="polite">
      {toasts.value.map(({ id, text, isError }) => (
        <div key={id} class={isError ? 'toast bad' : 'toast'}>
          <Icon of={isError ? warning : check} />
          <span>{text}</span>
          <IconButton icon={close} label="Dismiss" press={() => remove(id)} />
        </div>
      ))}
    </div>
  );
}

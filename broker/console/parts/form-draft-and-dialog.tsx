// Forms in dialogs, and the content of forms while it is edited. This module is not loaded with the first page, because
// that page has no dialog with a form.
import { useState } from 'preact/hooks';
import { Form, type FormProps } from './form.tsx';
import { Dialog } from './small-components.tsx';

/** The content of a form while it is edited, and functions that change it. */
export interface Editing<D> {
  draft: D;
  set: (changes: Partial<D>) => void;
  /** Binds an input to a field of the draft: returns `value` and `change` for the input. */
  bind: <K extends keyof D>(name: K) => { value: D[K]; change: (value: D[K]) => void };
}

export const editing = <D extends object>(draft: D, set: Editing<D>['set']): Editing<D> => ({
  draft,
  set,
  bind: (name) => ({
    value: draft[name],
    change: (value) => set({ [name]: value } as Pick<D, typeof name> & Partial<D>),
  }),
});

/** Stores the content of a form in the state of the calling component. */
export function useDraft<D extends object>(initial: D | (() => D)): Editing<D> {
  const [draft, setDraft] = useState(initial);
  return editing(draft, (changes) => setDraft((before) => ({ ...before, ...changes })));
}

/** Returns the number in a field; undefined if the field is empty. Throws if the text is not a number. */
export function numberOf(text: string, name: string): number | undefined {
  if (text === '') return undefined;
  if (!/^-?\d+(\.\d+)?$/.test(text)) throw new Error(`${name} must be a number`);
  return Number(text);
}

interface FormDialogProps<T> extends Omit<FormProps, 'run' | 'cancel'> {
  title: string;
  run: () => Promise<T>;
  close: () => void;
  /** Called with the result of `run` after the dialog was closed. */
  done?: ((result: T) => void) | undefined;
}

/** A form in a dialog. The dialog is closed after a successful submit. */
export function FormDialog<T>({ title, run, close, done, ...form }: FormDialogProps<T>) {
  const submit = async (): Promise<void> => {
    const result = await run();
    close();
    done?.(result);
  };
  return (
    <Dialog title={title} onClose={close}>
      <Form {...form} cancel={close} run={submit} />
    </Dialog>
  );
}

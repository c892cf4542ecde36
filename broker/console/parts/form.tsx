// Form fields with labels and hints, and the message of a failed submit.
import type { ComponentChildren } from 'preact';
import { useId, useState } from 'preact/hooks';
import { messageOf } from '../api-client.ts';
import { Button } from './button.tsx';
import { Notice } from './small-components.tsx';

interface FieldProps {
  label: string;
  hint?: string | undefined;
  /** Draws the input; `id` connects it with its label, `described` with its hint. */
  children: (id: string, described: string | undefined) => ComponentChildren;
}

export function Field({ label, hint, children }: FieldProps) {
  const id = useId();
  const hintId = `${id}-hint`;
  return (
    <div class="field">
      <label for={id}>{label}</label>
      {children(id, hint === undefined ? undefined : hintId)}
      {hint !== undefined && (
        <p class="hint" id={hintId}>
          {hint}
        </p>
      )}
    </div>
  );
}

interface TextProps {
  label: string;
  value: string;
  change: (value: string) => void;
  hint?: string | undefined;
  placeholder?: string;
  /** True if the text is hidden by dots. */
  secret?: boolean;
  /** True for a number. Spaces around it are left out. */
  numeric?: boolean;
  /** True if the field chooses a date and a time. Its value then has the form of `datetime-local`. */
  time?: boolean;
  required?: boolean;
  mono?: boolean;
  rows?: number;
  autoFocus?: boolean;
}

/** Focuses a field when it is first drawn. In a dialog, which is not open then, the attribute `autofocus` does this. */
const focus = (element: HTMLElement | null): void => element?.focus();

export function TextField(props: TextProps) {
  const { label, value, change, hint, rows, mono, secret, numeric, time, autoFocus, placeholder, required } =
    props;
  return (
    <Field label={label} hint={hint}>
      {(id, described) => {
        const shared = {
          id,
          value,
          placeholder,
          required,
          class: mono ? 'mono' : undefined,
          autoComplete: 'off',
          spellcheck: false,
          'aria-describedby': described,
          autofocus: autoFocus,
          ref: autoFocus ? focus : null,
        };
        const onInput = ({ currentTarget }: { currentTarget: { value: string } }): void =>
          change(numeric ? currentTarget.value.trim() : currentTarget.value);
        if (rows !== undefined) return <textarea {...shared} rows={rows} onInput={onInput} />;
        if (secret) return <input {...shared} type="password" onInput={onInput} />;
        if (time) return <input {...shared} type="datetime-local" onInput={onInput} />;
        return (
          <input {...shared} type="text" inputMode={numeric ? 'numeric' : undefined} onInput={onInput} />
        );
      }}
    </Field>
  );
}

interface SelectProps<T extends string> {
  label: string;
  value: T;
  options: readonly (readonly [value: T, text: string])[];
  change: (value: T) => void;
  hint?: string | undefined;
}

export function SelectField<T extends string>({ label, value, options, change, hint }: SelectProps<T>) {
  return (
    <Field label={label} hint={hint}>
      {(id, described) => (
        <select
          id={id}
          value={value}
          aria-describedby={described}
          onChange={({ currentTarget }) => change(currentTarget.value as T)}
        >
          {options.map(([option, text]) => (
            <option key={option} value={option}>
              {text}
            </option>
          ))}
        </select>
      )}
    </Field>
  );
}

export function CheckField({
  label,
  value,
  change,
}: {
  label: string;
  value: boolean;
  change: (value: boolean) => void;
}) {
  return (
    <label class="check">
      <input
        type="checkbox"
        checked={value}
        onChange={({ currentTarget }) => change(currentTarget.checked)}
      />
      <span>{label}</span>
    </label>
  );
}

interface CheckFieldsProps<T> {
  options: readonly (readonly [value: T, text: string])[];
  value: readonly T[];
  change: (value: readonly T[]) => void;
}

/** A checkbox for each option. */
export function CheckFields<T extends string>({ options, value, change }: CheckFieldsProps<T>) {
  return options.map(([option, text]) => (
    <CheckField
      key={option}
      label={text}
      value={value.includes(option)}
      change={(on) => change(on ? [...value, option] : value.filter((one) => one !== option))}
    />
  ));
}

export interface FormProps {
  submit: string;
  run: () => Promise<unknown>;
  children: ComponentChildren;
  cancel?: () => void;
  disabled?: boolean;
}

/** A form. The message of a failed submit is displayed above its buttons. Ctrl-Enter also submits the form. */
export function Form({ submit, run, children, cancel, disabled = false }: FormProps) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(undefined);
  const send = (): void => {
    if (busy || disabled) return;
    setBusy(true);
    setError(undefined);
    run()
      .catch(setError)
      .finally(() => setBusy(false));
  };
  return (
    <form
      class="form"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
      onKeyDown={(event) => {
        if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) event.currentTarget.requestSubmit();
      }}
    >
      {children}
      {error !== undefined && (
        <Notice tone="bad" role="alert">
          {messageOf(error)}
        </Notice>
      )}
      <footer>
        {cancel && <Button text="Cancel" press={cancel} />}
        <button type="submit" class="primary" disabled={disabled} aria-disabled={busy}>
          {submit}
        </button>
      </footer>
    </form>
  );
}

// Small components of many pages: states, times, cards with facts, copy buttons, tabs and dialogs.
import type { ComponentChildren } from 'preact';
import { useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks';
import { fullTime, relativeText } from '../format-times-and-sizes.ts';
import { after } from '../timers.ts';
import { Button, IconButton } from './button.tsx';
import { Icon, type IconNodes } from './icon.tsx';
import { check, close, copy, warning } from './icons.ts';
import { attempt } from './toasts.tsx';

const tones: Readonly<Record<string, string>> = {
  online: 'good',
  completed: 'good',
  delivered: 'good',
  ok: 'good',
  CONNECTED: 'good',
  running: 'busy',
  PENDING: 'busy',
  pending: 'busy',
  queued: 'idle',
  failed: 'bad',
  timeout: 'bad',
  lost: 'bad',
  missed: 'warn',
  expired: 'warn',
  skipped: 'warn',
  cancelled: 'warn',
  GRACE_PERIOD: 'warn',
  open: 'bad',
  acknowledged: 'warn',
  resolved: 'good',
  upgraded: 'good',
  staging: 'busy',
  switching: 'busy',
  busy: 'warn',
};

/** Returns the CSS class of a state's colour. */
export const toneOf = (state: string): string => tones[state] ?? 'idle';

/** A state with a coloured dot. The text contains the state too, so the colour is not needed to read it. */
export function State({ of, text = of }: { of: string; text?: string }) {
  return (
    <span class={`state ${toneOf(of)}`}>
      <i aria-hidden="true" />
      {text}
    </span>
  );
}

interface OnOffProps {
  enabled: boolean;
  /** Why the broker has turned the object off; null if a user has turned it off. */
  disabled_reason?: string | null;
}

/** Whether an object is on or off. */
export function OnOff({ enabled, disabled_reason: reason }: OnOffProps) {
  return (
    <State
      of={enabled ? 'online' : reason ? 'failed' : 'off'}
      text={enabled ? 'on' : (reason?.replaceAll('_', ' ') ?? 'off')}
    />
  );
}

/** A time in words, with the exact time as tooltip. */
export function Ago({ at }: { at: string | null | undefined }) {
  if (!at) return <span class="muted">never</span>;
  return (
    <time dateTime={at} title={fullTime(at)}>
      {relativeText(at)}
    </time>
  );
}

export function Tags({ of }: { of: readonly string[] }) {
  return (
    <span class="tags">
      {of.map((tag) => (
        <span key={tag} class="tag">
          {tag}
        </span>
      ))}
    </span>
  );
}

interface NoticeProps {
  tone?: 'warn' | 'bad';
  icon?: IconNodes;
  role?: 'alert';
  children: ComponentChildren;
}

/** A text in a frame that the user should not miss. */
export function Notice({ tone = 'warn', icon = warning, role, children }: NoticeProps) {
  return (
    <p class={`notice ${tone}`} role={role}>
      <Icon of={icon} />
      <span>{children}</span>
    </p>
  );
}

export function Card({ title, children }: { title: string; children: ComponentChildren }) {
  return (
    <section class="card">
      <h2>{title}</h2>
      <div class="card-body">{children}</div>
    </section>
  );
}

/** A name with its value, inside of a `<dl>`. */
export function Fact({ name, children }: { name: string; children: ComponentChildren }) {
  return (
    <>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </>
  );
}

const copiedMs = 1_500;

export function CopyButton({ text }: { text: string }) {
  const [done, setDone] = useState(false);
  const press = async (): Promise<void> => {
    if (!(await attempt(() => navigator.clipboard.writeText(text)))) return;
    setDone(true);
    after(copiedMs, () => setDone(false));
  };
  return <Button icon={done ? check : copy} text={done ? 'Copied' : 'Copy'} press={() => void press()} />;
}

export interface Tab {
  name: string;
  text: string;
  href: string;
  icon?: IconNodes | undefined;
}

/**
 * Returns the click handler of a button that runs an action. `busy` is true while the action runs, and for at least
 * `leastMs`. Clicks in this time do nothing. Set the button's `aria-disabled` to `busy`, because with `disabled` it
 * would lose the focus.
 */
export function useClick(action: () => Promise<unknown>, leastMs = 0): { busy: boolean; click: () => void } {
  const [busy, setBusy] = useState(false);
  const click = (): void => {
    if (busy) return;
    setBusy(true);
    const pause = new Promise<void>((resolve) => after(leastMs, resolve));
    void Promise.all([action(), pause]).finally(() => setBusy(false));
  };
  return { busy, click };
}

export function Tabs({ label, tabs, current }: { label: string; tabs: readonly Tab[]; current: string }) {
  const element = useRef<HTMLElement>(null);
  // Scrolls the selected tab into view, because on a phone not all tabs fit the screen.
  useEffect(() => {
    element.current?.querySelector('[aria-current]')?.scrollIntoView({ block: 'nearest', inline: 'nearest' });
  }, [current]);
  return (
    <nav class="tabs" aria-label={label} ref={element}>
      {tabs.map(({ name, text, href, icon }) => (
        <a key={name} href={href} aria-current={name === current ? 'page' : undefined}>
          {icon && <Icon of={icon} />}
          {text}
        </a>
      ))}
    </nav>
  );
}

interface ChoiceProps<T extends string> {
  label: string;
  options: readonly (readonly [value: T, text: string])[];
  value: T;
  choose: (value: T) => void;
}

/** A drop-down list in a bar of filters. The user chooses one option. For few options use Choice. */
export function Select<T extends string>({ label, options, value, choose }: ChoiceProps<T>) {
  return (
    <label class="select">
      <span class="only-read">{label}</span>
      <select value={value} onChange={({ currentTarget }) => choose(currentTarget.value as T)}>
        {options.map(([option, text]) => (
          <option key={option} value={option}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

/** A group of buttons, of which one is chosen. */
export function Choice<T extends string>({ label, options, value, choose }: ChoiceProps<T>) {
  return (
    <fieldset class="choice">
      <legend class="only-read">{label}</legend>
      {options.map(([option, text]) => (
        <Button key={option} text={text} aria-pressed={option === value} press={() => choose(option)} />
      ))}
    </fieldset>
  );
}

/** The number of items that are displayed, and a button that displays more; nothing if all are displayed. */
export function More({ count, of, more }: { count: number; of: number; more: () => void }) {
  if (count >= of) return null;
  return (
    <p class="more">
      {count.toLocaleString()} of {of.toLocaleString()}
      <Button text="More" press={more} />
    </p>
  );
}

interface DialogProps {
  title: string;
  onClose: () => void;
  children: ComponentChildren;
}

/** Opens a modal dialog, and returns the focus to the previous element when the dialog closes. */
export function useModal() {
  const element = useRef<HTMLDialogElement>(null);
  // A layout effect runs before the next paint, so that the dialog receives the first letter that the user types.
  useLayoutEffect(() => {
    const dialog = element.current;
    dialog?.showModal();
    // close() returns the focus to the element that had it before showModal().
    return () => dialog?.close();
  }, []);
  return element;
}

/** A dialog above the page. Escape or a click outside closes it. */
export function Dialog({ title, onClose, children }: DialogProps) {
  const element = useModal();
  return (
    <dialog
      ref={element}
      aria-label={title}
      onCancel={(event) => {
        event.preventDefault();
        onClose();
      }}
      onMouseDown={(event) => {
        if (event.target === element.current) onClose();
      }}
    >
      <div class="dialog">
        <header>
          <h2>{title}</h2>
          <IconButton icon={close} label="Close" press={onClose} />
        </header>
        {children}
      </div>
    </dialog>
  );
}

export interface ConfirmProps {
  title: string;
  action: string;
  children: ComponentChildren;
  run: () => Promise<unknown>;
  onClose: () => void;
}

/** Asks for a confirmation of something that cannot be undone. */
export function Confirm({ title, action, children, run, onClose }: ConfirmProps) {
  const { busy, click } = useClick(async () => {
    if (await attempt(run)) onClose();
  });
  return (
    <Dialog title={title} onClose={onClose}>
      <div class="dialog-body">{children}</div>
      <footer>
        <Button text="Cancel" press={onClose} />
        <Button text={action} class="danger" aria-disabled={busy} press={click} />
      </footer>
    </Dialog>
  );
}

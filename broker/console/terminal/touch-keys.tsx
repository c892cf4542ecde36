// Buttons below the terminal for keys that a touch screen lacks.
import { signal } from '@preact/signals';
import { Button } from '../parts/button.tsx';
import { attempt } from '../parts/toasts.tsx';
import type { Emulator } from './xterm-setup.ts';

/** True if the next letter is typed with Ctrl. */
const withCtrl = signal(false);

/** Returns the text to type. If the Ctrl button was pressed before, a letter becomes its control character. */
export function afterCtrl(text: string): string {
  if (!withCtrl.peek() || text.length !== 1) return text;
  withCtrl.value = false;
  return String.fromCharCode(text.toUpperCase().charCodeAt(0) & 31);
}

/**
 * Text, name for screen readers, and bytes of each key. An arrow key has only the last letter of its escape sequence
 * here, because the terminal's cursor key mode decides whether the sequence begins with ESC [ or ESC O.
 */
const keys: readonly (readonly [text: string, name: string, bytes: string])[] = [
  ['Esc', 'Escape', '\u001b'],
  ['Tab', 'Tab', '\t'],
  ['^C', 'Ctrl C', '\u0003'],
  ['←', 'Left', 'D'],
  ['↑', 'Up', 'A'],
  ['↓', 'Down', 'B'],
  ['→', 'Right', 'C'],
];

export function TouchKeys({ emulator }: { emulator: Emulator | undefined }) {
  const press = (bytes: string): void => {
    if (!emulator) return;
    const { terminal } = emulator;
    const arrow = terminal.modes.applicationCursorKeysMode ? '\u001bO' : '\u001b[';
    terminal.input(/[A-D]/.test(bytes) ? arrow + bytes : bytes);
    terminal.focus();
  };
  const paste = (): Promise<boolean> =>
    attempt(async () => emulator?.terminal.paste(await navigator.clipboard.readText()));
  return (
    // A press does not move the focus, so that the keyboard of a phone stays open.
    <div class="touch-keys" onMouseDown={(event) => event.preventDefault()}>
      <Button
        text="Ctrl"
        aria-pressed={withCtrl.value}
        press={() => {
          withCtrl.value = !withCtrl.value;
          emulator?.terminal.focus();
        }}
      />
      {keys.map(([text, name, bytes]) => (
        <Button key={text} text={text} aria-label={name} press={() => press(bytes)} />
      ))}
      <Button text="Paste" press={() => void paste()} />
    </div>
  );
}

// Sets the local terminal to raw mode while a remote terminal is displayed, and restores it afterwards.

/** DEC private modes that stay set when a program ends: cursor keys, mouse, alternate screen… */
const lasting = new Set([1, 9, 47, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 1047, 1049, 2004]);
/** The DEC modes that show the alternate screen, which programs such as editors fill. */
const alternateScreen = [47, 1047, 1049];
/**
 * The DEC mode that makes the cursor visible. This mode is on when a terminal starts. If a program turned it off,
 * undo() turns it on again.
 */
const cursor = 25;
// biome-ignore lint/suspicious/noControlCharactersInRegex: escape sequences begin with a control character
const modeChange = /\x1b\[\?([\d;]+)([hl])/g;
/** Output arrives in pieces. An escape sequence of at most this many bytes is recognized even if it is split. */
const longestSequence = 32;

/** Tracks the terminal modes that a remote program sets, because a program may end without resetting them. */
export function watchModes() {
  const set = new Set<number>();
  let tail = '';
  return {
    see(bytes: Uint8Array): void {
      const text = tail + Buffer.from(bytes.buffer, bytes.byteOffset, bytes.length).toString('latin1');
      for (const [, modes = '', how] of text.matchAll(modeChange)) {
        for (const mode of modes.split(';').map(Number)) {
          const on = mode === cursor ? how === 'l' : how === 'h' && lasting.has(mode);
          if (on) set.add(mode);
          else set.delete(mode);
        }
      }
      tail = text.slice(-longestSequence);
    },
    /** True while the local terminal displays the alternate screen. */
    get isAlternateScreen(): boolean {
      return alternateScreen.some((mode) => set.has(mode));
    },
    /**
     * Returns escape sequences for the local terminal. They reset the text attributes and the modes that the output has
     * set.
     */
    undo(): string {
      const resets = [...set].map((mode) => `\x1b[?${mode}${mode === cursor ? 'h' : 'l'}`);
      set.clear();
      return `${resets.join('')}\x1b[0m`;
    },
  };
}

/**
 * Turns on raw mode if there is a terminal. Returns a function that turns it off. The exit of the process
 * also turns it off.
 */
export function rawMode(): () => void {
  if (!process.stdin.isTTY) return () => {};
  process.stdin.setRawMode(true);
  const restore = (): void => {
    process.off('exit', restore);
    process.stdin.setRawMode(false);
  };
  process.on('exit', restore);
  return restore;
}

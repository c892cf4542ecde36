// The terminal that this program runs in: raw while it displays a remote one, and restored afterwards.

/** DEC private modes that stay set when a program ends: cursor keys, mouse, alternate screen… */
const lasting = new Set([1, 9, 47, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 1047, 1049, 2004]);
/** Hidden by a reset, not by a set. */
const cursor = 25;
// biome-ignore lint/suspicious/noControlCharactersInRegex: escape sequences begin with one
const modeChange = /\x1b\[\?([\d;]+)([hl])/g;
/** A sequence may be split over two pieces. */
const longestSequence = 32;

/** Notes what a program has changed of the screen, so that it can be undone if it does not do that itself. */
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
    /** What puts it all back, attributes included. */
    undo(): string {
      const resets = [...set].map((mode) => `\x1b[?${mode}${mode === cursor ? 'h' : 'l'}`);
      set.clear();
      return `${resets.join('')}\x1b[0m`;
    },
  };
}

/** Raw mode on, where there is a terminal; the result puts it back, also when the process ends unasked. */
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

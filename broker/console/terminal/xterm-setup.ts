// The terminal emulator (xterm) with search and links, set up for the page's content security policy. It is loaded
// with the tab of terminals.
import { FitAddon } from '@xterm/addon-fit';
import { SearchAddon } from '@xterm/addon-search';
import { WebLinksAddon } from '@xterm/addon-web-links';
import { type ITheme, Terminal } from '@xterm/xterm';

const nonce = document.querySelector<HTMLMetaElement>('meta[property="csp-nonce"]')?.nonce ?? '';

/**
 * Gives the page's nonce to every new style element. xterm creates these elements without a nonce, so the
 * Content-Security-Policy would refuse them, and the text would be black.
 */
const createElement = document.createElement.bind(document);
document.createElement = (name: string, options?: ElementCreationOptions): HTMLElement => {
  const element = createElement(name, options);
  if (name === 'style') element.nonce = nonce;
  return element;
};

const dark: ITheme = {
  background: '#101112',
  foreground: '#e4e4e1',
  cursor: '#8fb0ff',
  selectionBackground: '#34467a',
  black: '#2a2c2f',
  red: '#ff8a80',
  green: '#6fcf97',
  yellow: '#f0b357',
  blue: '#8fb0ff',
  magenta: '#d7a1f9',
  cyan: '#6fd3e0',
  white: '#d6d6d2',
  brightBlack: '#7d7d78',
  brightRed: '#ffaaa3',
  brightGreen: '#97e0b5',
  brightYellow: '#f7cf8f',
  brightBlue: '#b4cbff',
  brightMagenta: '#e5c4fb',
  brightCyan: '#a0e4ed',
  brightWhite: '#ffffff',
};

const light: ITheme = {
  background: '#ffffff',
  foreground: '#1c1c1a',
  cursor: '#2450c4',
  cursorAccent: '#ffffff',
  selectionBackground: '#cddafb',
  black: '#1c1c1a',
  red: '#b3261e',
  green: '#15703f',
  yellow: '#8a5300',
  blue: '#2450c4',
  magenta: '#8a2fb0',
  cyan: '#0f6b7a',
  white: '#65645f',
  brightBlack: '#65645f',
  brightRed: '#c6372e',
  brightGreen: '#1c8049',
  brightYellow: '#9a6200',
  brightBlue: '#2f5fd9',
  brightMagenta: '#9b3cc4',
  brightCyan: '#127a8c',
  brightWhite: '#3a3a37',
};

export type Emulator = ReturnType<typeof createEmulator>;

export function createEmulator(element: HTMLElement, isDark: boolean) {
  const terminal = new Terminal({
    allowProposedApi: true,
    // A blinking cursor makes Chromium paint all the time, which delays messages of the broker: an echo took 30 ms
    // instead of 13 ms.
    cursorBlink: false,
    fontFamily: 'ui-monospace, "SF Mono", "Cascadia Code", Menlo, "DejaVu Sans Mono", monospace',
    fontSize: 13,
    lineHeight: 1.2,
    scrollback: 10_000,
    minimumContrastRatio: 4.5,
    theme: isDark ? dark : light,
  });
  const fit = new FitAddon();
  const search = new SearchAddon();
  terminal.loadAddon(fit);
  terminal.loadAddon(search);
  // A link opens only on Ctrl-click, because a program on the machine can write any link.
  terminal.loadAddon(
    new WebLinksAddon((event, address) => {
      if (event.ctrlKey || event.metaKey) window.open(address, '_blank', 'noopener,noreferrer');
    }),
  );
  terminal.open(element);
  fit.fit();
  return {
    terminal,
    search,
    /** Makes the terminal as large as its element. */
    fit: () => fit.fit(),
    paint(darkNow: boolean): void {
      terminal.options.theme = darkNow ? dark : light;
    },
    /**
     * Lets screen readers read the output. While this is on, characters without a key of their own, such as emoji,
     * cannot be typed.
     */
    readAloud(on: boolean): void {
      terminal.options.screenReaderMode = on;
    },
    write: writerOf(terminal),
  };
}

/**
 * If more bytes than this wait to be drawn, the program on the machine has to wait. A hidden page draws only once a
 * second. Its limit is larger, so that it does not slow programs down.
 */
const mostWaiting = { visible: 128 * 1024, hidden: 8 * 1024 * 1024 };

/**
 * Returns a function that draws output. Its promise resolves when the page can take more, so that a program cannot
 * write faster than the page draws.
 */
function writerOf(terminal: Terminal): (bytes: Uint8Array) => Promise<void> {
  let waiting = 0;
  let resolve = (): void => {};
  const isEnough = (): boolean => waiting <= mostWaiting[document.visibilityState];
  return (bytes) =>
    new Promise((done) => {
      waiting += bytes.length;
      // While few bytes wait, the caller can write the next piece at once, so that xterm parses several pieces before
      // it draws.
      terminal.write(bytes, () => {
        waiting -= bytes.length;
        if (isEnough()) resolve();
      });
      if (isEnough()) done();
      else resolve = done;
    });
}

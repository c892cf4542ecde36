// The text editor (CodeMirror), set up for the page's content security policy.
import { defaultKeymap, history, historyKeymap, indentWithTab } from '@codemirror/commands';
import {
  bracketMatching,
  HighlightStyle,
  indentOnInput,
  StreamLanguage,
  syntaxHighlighting,
} from '@codemirror/language';
import { highlightSelectionMatches, search, searchKeymap } from '@codemirror/search';
import { EditorState } from '@codemirror/state';
import {
  drawSelection,
  EditorView,
  highlightActiveLine,
  highlightSpecialChars,
  keymap,
  lineNumbers,
} from '@codemirror/view';
import { tags } from '@lezer/highlight';
import { languageOf } from './languages.ts';

const nonce = document.querySelector<HTMLMetaElement>('meta[property="csp-nonce"]')?.nonce ?? '';

const look = EditorView.theme({
  '&': { height: '100%', fontSize: '13px', color: 'var(--text)', backgroundColor: 'var(--surface)' },
  '.cm-scroller': { fontFamily: 'var(--mono)', lineHeight: '1.55' },
  '.cm-content': { caretColor: 'var(--accent-text)' },
  '.cm-cursor': { borderLeftColor: 'var(--accent-text)', borderLeftWidth: '2px' },
  '.cm-gutters': { backgroundColor: 'var(--surface)', color: 'var(--muted)', border: 'none' },
  '.cm-activeLine, .cm-activeLineGutter': {
    backgroundColor: 'color-mix(in srgb, var(--hover) 60%, transparent)',
  },
  '&.cm-focused': { outline: 'none' },
  '&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground': {
    backgroundColor: 'color-mix(in srgb, var(--accent) 26%, transparent)',
  },
  '.cm-panels': { backgroundColor: 'var(--raised)', color: 'var(--text)', borderColor: 'var(--line)' },
  '.cm-panel.cm-search input, .cm-panel.cm-search button': {
    backgroundImage: 'none',
    minHeight: '26px',
    width: 'auto',
  },
  '.cm-searchMatch': { backgroundColor: 'color-mix(in srgb, var(--warn-fill) 35%, transparent)' },
});

const colors = HighlightStyle.define([
  { tag: [tags.keyword, tags.operatorKeyword, tags.modifier], color: 'var(--accent-text)' },
  { tag: [tags.string, tags.special(tags.string)], color: 'var(--good)' },
  { tag: [tags.number, tags.bool, tags.null, tags.atom], color: 'var(--warn)' },
  { tag: [tags.comment, tags.meta], color: 'var(--muted)' },
  { tag: [tags.propertyName, tags.attributeName, tags.definition(tags.variableName)], color: 'var(--bad)' },
]);

export type CodeEditor = ReturnType<typeof createEditor>;

export interface EditorInput {
  element: HTMLElement;
  name: string;
  text: string;
  readOnly: boolean;
  /** Called after each change. */
  onChange: () => void;
  /** Called when the user saves by a key. */
  onSave: () => void;
}

/**
 * Returns the line separator of a file: CRLF if all of its lines end with CRLF, otherwise LF. Saving then changes no
 * line that the user did not edit.
 */
function separatorOf(text: string): string {
  return /\r\n/.test(text) && !/(?<!\r)\n/.test(text) ? '\r\n' : '\n';
}

export function createEditor({ element, name, text, readOnly, onChange, onSave }: EditorInput) {
  const language = languageOf(name, text);
  const save = {
    key: 'Mod-s',
    preventDefault: true,
    run(): boolean {
      onSave();
      return true;
    },
  };
  const stateOf = (doc: string): EditorState =>
    EditorState.create({
      doc,
      extensions: [
        EditorView.cspNonce.of(nonce),
        EditorState.lineSeparator.of(separatorOf(doc)),
        EditorState.readOnly.of(readOnly),
        EditorState.tabSize.of(4),
        EditorView.contentAttributes.of({ 'aria-label': `Content of ${name}` }),
        lineNumbers(),
        history(),
        drawSelection(),
        highlightSpecialChars(),
        highlightActiveLine(),
        highlightSelectionMatches(),
        indentOnInput(),
        bracketMatching(),
        search({ top: true }),
        syntaxHighlighting(colors),
        ...(language ? [StreamLanguage.define(language)] : []),
        // indentWithTab binds Tab, which otherwise moves the focus. To leave the editor, press Escape and then Tab.
        keymap.of([save, ...searchKeymap, ...defaultKeymap, ...historyKeymap, indentWithTab]),
        EditorView.updateListener.of(({ docChanged }) => docChanged && onChange()),
        look,
      ],
    });
  const view = new EditorView({ parent: element, state: stateOf(text) });
  return {
    /** Returns the text. Its lines end with CRLF or LF, as in the file. */
    text: () => view.state.sliceDoc(),
    replace: (replacement: string) => view.setState(stateOf(replacement)),
    focus: () => view.focus(),
    close: () => view.destroy(),
  };
}

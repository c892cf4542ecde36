// Edits a text file of a machine. If another person has saved the file meanwhile, asks before replacing that version.
// This module and the editor are loaded when the first file is opened.
import { useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks';
import { client, clientWithEtag, FarhandError, loginEnded } from '../api-client.ts';
import { baseOf } from '../files/paths.ts';
import { may } from '../login-state.ts';
import { Button } from '../parts/button.tsx';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { Empty, Show } from '../parts/loading-failed-or-empty.tsx';
import { Confirm } from '../parts/small-components.tsx';
import { say, sayError } from '../parts/toasts.tsx';
import { useData } from '../parts/use-data.ts';
import { guardLeaving, setQuery } from '../router.ts';
import { type CodeEditor, createEditor, type EditorInput } from './code-editor.ts';
import { diffOf } from './diff.ts';

/** A version of the file, as it is on the machine. */
interface Version {
  /** The content of the file; undefined if the file is not UTF-8. */
  text: string | undefined;
  etag: string | undefined;
}

async function readFile(machine: string, path: string, signal?: AbortSignal): Promise<Version> {
  const response = await client.files.download({ machine_id: machine, path }, signal && { signal });
  const etag = response.headers.get('etag') ?? undefined;
  const bytes = await response.arrayBuffer();
  try {
    return { text: new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes), etag };
  } catch {
    return { text: undefined, etag };
  }
}

/**
 * Saves the text if the file is still the version with this ETag. Resolves with the ETag of the new version.
 */
async function saveFile(
  machine: string,
  path: string,
  text: string,
  etag?: string,
): Promise<string | undefined> {
  let saved: string | undefined;
  const writer = clientWithEtag((value) => {
    saved = value ?? undefined;
  });
  const condition = etag !== undefined && { if_match: etag };
  await writer.files.write({ machine_id: machine, path, content: text, ...condition });
  return saved;
}

export function EditFile({ machine, path }: { machine: string; path: string }) {
  const version = useData((signal) => readFile(machine, path, signal), [machine, path], null);
  return (
    <div class="editor-page">
      <Show of={version}>
        {({ text, etag }) =>
          text === undefined || text.includes('\0') ? (
            <Empty icon={icons.file} title="This is not a text file">
              <p>Download it to open it with a program of your own.</p>
              <Button text="Back to the folder" press={() => setQuery({ edit: '' })} />
            </Empty>
          ) : (
            <Editor machine={machine} path={path} text={text} etag={etag} />
          )
        }
      </Show>
    </div>
  );
}

interface EditorProps {
  machine: string;
  path: string;
  text: string;
  etag: string | undefined;
}

/**
 * The text that was not saved when the login ended. After the next login with the same key, the editor of its file
 * displays it. A login with another key loads the page again, which discards the text.
 */
let unsaved: EditorProps | undefined;

function takeUnsaved({ machine, path }: EditorProps): EditorProps | undefined {
  const kept = unsaved?.machine === machine && unsaved.path === path ? unsaved : undefined;
  unsaved = undefined;
  return kept;
}

/** Creates the editor in `element`. */
function useCodeEditor(input: Omit<EditorInput, 'element'>) {
  const element = useRef<HTMLDivElement>(null);
  const editor = useRef<CodeEditor | undefined>(undefined);
  useEffect(() => {
    if (!element.current) return undefined;
    const opened = createEditor({ element: element.current, ...input });
    editor.current = opened;
    opened.focus();
    return () => opened.close();
  }, []);
  return { element, editor };
}

/** The text in the editor, whether it is saved, and the version that another person has saved meanwhile. */
function useEditing(given: EditorProps) {
  const [kept] = useState(() => takeUnsaved(given));
  const { machine, path, text, etag } = kept ?? given;
  const known = useRef(etag);
  const [changed, setChanged] = useState(kept !== undefined);
  const [theirs, setTheirs] = useState<Version | undefined>(undefined);
  const { element, editor } = useCodeEditor({
    name: baseOf(path),
    text,
    readOnly: !may('files:write'),
    onChange: () => setChanged(true),
    onSave: () => void save(),
  });
  const saveNow = async (): Promise<void> => {
    const saved = editor.current?.text() ?? text;
    try {
      known.current = await saveFile(machine, path, saved, known.current);
    } catch (error) {
      if (!(error instanceof FarhandError && error.code === 'precondition_failed')) return sayError(error);
      return readFile(machine, path).then(setTheirs, sayError);
    }
    // The user may have typed since the save began.
    setChanged(editor.current?.text() !== saved);
    setTheirs(undefined);
    say(`${baseOf(path)} is saved`);
  };
  const saving = useRef(Promise.resolve());
  /** Saves the text once earlier saves have ended, because each save needs the ETag of the version before. */
  const save = (): Promise<void> => (saving.current = saving.current.then(saveNow));
  const replace = (version: Version): void => {
    editor.current?.replace(version.text ?? '');
    known.current = version.etag;
    setChanged(false);
    setTheirs(undefined);
  };
  /**
   * Saves the editor's text over the other person's version. If the file has changed again since that version was
   * displayed, saves nothing and displays the newer version.
   */
  const overwrite = async (version: Version): Promise<void> => {
    known.current = version.etag;
    await save();
  };
  /** Keeps the text for the next login. */
  const keep = (): void => {
    unsaved = { machine, path, text: editor.current?.text() ?? text, etag: known.current };
  };
  return { element, editor, keep, changed, theirs, setTheirs, save, replace, overwrite };
}

function Editor(props: EditorProps) {
  const { path } = props;
  const { element, editor, keep, changed, theirs, setTheirs, save, replace, overwrite } = useEditing(props);
  /** Opens the page to which the user wants to go. Set while the dialog about unsaved changes is open. */
  const [leave, setLeave] = useState<(() => void) | undefined>(undefined);
  // A layout effect runs before the next paint. So the page asks about unsaved changes as soon as it displays "not
  // saved".
  useLayoutEffect(() => {
    if (!changed) return undefined;
    const warn = (event: BeforeUnloadEvent): void => event.preventDefault();
    addEventListener('beforeunload', warn);
    const endGuard = guardLeaving((open) => setLeave(() => open));
    return () => {
      removeEventListener('beforeunload', warn);
      endGuard();
      if (loginEnded.peek()) keep();
    };
  }, [changed]);
  return (
    <>
      <div class="editor-bar">
        <Button icon={icons.left} text="Back" class="quiet" press={() => setQuery({ edit: '' })} />
        <strong class="mono cut" title={path}>
          {path}
        </strong>
        {changed && <span class="tag">not saved</span>}
        {may('files:write') ? (
          <Button class="primary" disabled={!changed} press={() => void save()}>
            Save
            <kbd>Ctrl S</kbd>
          </Button>
        ) : (
          <span class="muted">read-only</span>
        )}
      </div>
      {theirs && (
        <Conflict
          theirs={theirs.text ?? ''}
          mine={editor.current?.text() ?? ''}
          take={() => replace(theirs)}
          overwrite={() => void overwrite(theirs)}
          later={() => setTheirs(undefined)}
        />
      )}
      <div class="editor" ref={element} />
      {leave && (
        <Confirm
          title="Leave without saving?"
          action="Leave"
          onClose={() => setLeave(undefined)}
          run={() => Promise.resolve(leave())}
        >
          <p>Your changes in {baseOf(path)} would be lost.</p>
        </Confirm>
      )}
    </>
  );
}

interface ConflictProps {
  theirs: string;
  mine: string;
  take: () => void;
  overwrite: () => void;
  later: () => void;
}

const signs = { same: ' ', mine: '+', theirs: '-' } as const;

function Conflict({ theirs, mine, take, overwrite, later }: ConflictProps) {
  return (
    <section class="conflict" aria-label="Somebody else saved this file" role="alert">
      <header>
        <Icon of={icons.warning} />
        <span>
          <strong>Somebody else saved this file.</strong> Your changes were not written. Lines with − are
          theirs, lines with + are yours.
        </span>
      </header>
      <pre>
        {diffOf(theirs, mine).map(({ kind, text }, index) => (
          <span key={index} class={kind}>{`${signs[kind]} ${text}\n`}</span>
        ))}
      </pre>
      <footer>
        <Button text="Go on editing" press={later} />
        <Button text="Take theirs" press={take} />
        <Button text="Replace it with mine" class="danger" press={overwrite} />
      </footer>
    </section>
  );
}

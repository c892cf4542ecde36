// The file browser of a machine: folders, uploads by drag and drop, and actions on each entry.
import { useEffect, useRef, useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { may } from '../login-state.ts';
import { Button, IconButton } from '../parts/button.tsx';
import { CheckField } from '../parts/form.tsx';
import * as icons from '../parts/icons.ts';
import { later } from '../parts/lazy-component.tsx';
import { Failed, Placeholder, Show } from '../parts/loading-failed-or-empty.tsx';
import { SearchField } from '../parts/search-field-in-url.tsx';
import { Choice, Confirm } from '../parts/small-components.tsx';
import { attempt } from '../parts/toasts.tsx';
import { useData } from '../parts/use-data.ts';
import { choiceIn, place } from '../router.ts';
import { EntryList } from './entry-list.tsx';
import { Names, NewFolder } from './file-dialogs.tsx';
import { crumbsOf, goToPath, type Listing, parentOf } from './paths.ts';
import { type SearchBy, SearchResults } from './search-results.tsx';
import { UploadTray } from './upload-tray.tsx';
import { arrivals, type Chosen, droppedFiles, upload } from './uploads.ts';

const EditFile = later(async () => (await import('../editor/edit-file.tsx')).EditFile);

const searches = [
  ['name', 'Names'],
  ['content', 'Content'],
] as const;

/** Number of entries that are read at first. The button `More` reads this many more. */
const mostAtFirst = 1_000;
/**
 * Maximum number of entries of a folder that are listed, the largest `limit` that the broker accepts. A search finds
 * the others.
 */
const mostListed = 10_000;

export function Files({ machine }: { machine: string }) {
  const { query } = place.value;
  const path = query.get('path') ?? '';
  const editing = query.get('edit');
  const text = query.get('find') ?? '';
  const by = choiceIn('in', searches);
  const [hidden, setHidden] = useState(false);
  const [limit, setLimit] = useState(mostAtFirst);
  const asked = { machine_id: machine, hidden, limit, ...(path && { path }) };
  const listing = useData(
    (signal) => client.files.list(asked, { signal }),
    [machine, path, hidden, limit],
    ({ type, data }) => type.startsWith('file.') && data.machine_id === machine,
  );
  useEffect(() => setLimit(mostAtFirst), [machine, path]);
  const arrived = arrivals.value;
  useEffect(() => {
    if (arrived > 0) listing.reload();
  }, [arrived]);
  if (editing !== null) return <EditFile key={editing} machine={machine} path={editing} />;
  return (
    <div class="files">
      <Toolbar
        machine={machine}
        listing={listing.data}
        path={path}
        hidden={hidden}
        setHidden={setHidden}
        reload={listing.reload}
      />
      <SearchBar text={text} by={by} />
      {text !== '' ? (
        <SearchResults
          machine={machine}
          folder={listing.data?.path ?? path}
          hidden={hidden}
          text={text}
          by={by.value}
        />
      ) : listing.error !== undefined ? (
        <Failed error={listing.error} retry={listing.reload} />
      ) : (
        <Show of={listing}>
          {(data) => (
            <Listed
              machine={machine}
              listing={data}
              reload={listing.reload}
              more={limit < mostListed ? () => setLimit(limit + mostAtFirst) : undefined}
            />
          )}
        </Show>
      )}
      <UploadTray />
    </div>
  );
}

interface ListedProps {
  machine: string;
  listing: Listing;
  reload: () => void;
  /** Reads more entries; undefined if no more can be listed. */
  more: (() => void) | undefined;
}

function Listed({ machine, listing, reload, more }: ListedProps) {
  return (
    <DropZone machine={machine} listing={listing}>
      <EntryList machine={machine} listing={listing} reload={reload} />
      {listing.has_more && (
        <p class="more">
          {listing.files.length.toLocaleString()} of {listing.total.toLocaleString()}
          {more ? <Button text="More" press={more} /> : '; use the search to find the others'}
        </p>
      )}
    </DropZone>
  );
}

function SearchBar({ text, by }: { text: string; by: ReturnType<typeof choiceIn<SearchBy>> }) {
  return (
    <div class="filters">
      <SearchField label="Search below this folder" name="find" />
      {text !== '' && <Choice label="Search in" {...by} />}
      {by.value === 'name' && text !== '' && <span class="hint">Wildcards: * and ?</span>}
    </div>
  );
}

interface ToolbarProps {
  machine: string;
  listing: Listing | undefined;
  path: string;
  hidden: boolean;
  setHidden: (hidden: boolean) => void;
  reload: () => void;
}

function Toolbar({ machine, listing, path, hidden, setHidden, reload }: ToolbarProps) {
  const [creating, setCreating] = useState(false);
  const picker = useRef<HTMLInputElement>(null);
  const [chosen, setChosen] = useState<readonly Chosen[] | undefined>(undefined);
  const here = listing?.path ?? path;
  return (
    <div class="file-bar">
      <PathBar path={here} />
      <CheckField label="Hidden" value={hidden} change={setHidden} />
      {may('files:write') && listing && (
        <>
          <Button icon={icons.folderPlus} text="New folder" press={() => setCreating(true)} />
          <Button icon={icons.upload} text="Upload" class="primary" press={() => picker.current?.click()} />
          <input
            ref={picker}
            type="file"
            multiple
            hidden
            aria-label="Files to upload"
            onChange={({ currentTarget }) => {
              setChosen([...(currentTarget.files ?? [])].map((file) => ({ path: file.name, file })));
              currentTarget.value = '';
            }}
          />
        </>
      )}
      {creating && (
        <NewFolder machine={machine} folder={here} close={() => setCreating(false)} reload={reload} />
      )}
      {chosen && listing && (
        <Sending machine={machine} listing={listing} files={chosen} close={() => setChosen(undefined)} />
      )}
    </div>
  );
}

/** The path as links, with a button that turns the path into a text field. */
function PathBar({ path }: { path: string }) {
  const [typed, setTyped] = useState<string | undefined>(undefined);
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => field.current?.select(), [typed === undefined]);
  if (typed !== undefined) {
    return (
      <form
        class="path-bar"
        onSubmit={(event) => {
          event.preventDefault();
          setTyped(undefined);
          goToPath({ path: typed.trim() });
        }}
      >
        <input
          ref={field}
          class="mono"
          aria-label="Path"
          value={typed}
          spellcheck={false}
          onInput={({ currentTarget }) => setTyped(currentTarget.value)}
          onBlur={() => setTyped(undefined)}
          onKeyDown={({ key }) => key === 'Escape' && setTyped(undefined)}
        />
      </form>
    );
  }
  return (
    <div class="path-bar">
      <IconButton
        icon={icons.up}
        label="Parent folder"
        disabled={path === '/' || path === ''}
        press={() => goToPath({ path: parentOf(path) })}
      />
      <nav aria-label="Path">
        {crumbsOf(path).map((crumb) => (
          <Button
            key={crumb.path}
            text={crumb.name}
            class="quiet"
            press={() => goToPath({ path: crumb.path })}
          />
        ))}
      </nav>
      <IconButton icon={icons.edit} label="Type a path" size={14} press={() => setTyped(path)} />
    </div>
  );
}

interface SendingProps {
  machine: string;
  listing: Listing;
  files: readonly Chosen[];
  close: () => void;
}

/** Returns the first part of a chosen path: the name of the file, or of the dropped folder that contains it. */
const topOf = ({ path }: Chosen): string => path.split('/', 1)[0] ?? '';

/** Starts uploads. If one of them would replace an entry of the list, asks for confirmation first. */
function Sending({ machine, listing, files, close }: SendingProps) {
  const there = new Set(listing.files.map(({ name }) => name));
  const replaced = new Set(files.map(topOf).filter((name) => there.has(name)));
  const names = [...replaced];
  const start = (): void => {
    upload(machine, listing.path, files, (file) => replaced.has(topOf(file)));
    close();
  };
  useEffect(() => {
    if (names.length === 0) start();
  }, []);
  if (names.length === 0) return null;
  return (
    <Confirm
      title={names.length === 1 ? `Replace ${names[0]}?` : `Replace ${names.length} files or folders?`}
      action="Replace"
      onClose={close}
      run={() => Promise.resolve(start())}
    >
      <p>In folders, only files with the same names are replaced. These exist already:</p>
      <Names names={names} />
    </Confirm>
  );
}

interface DropZoneProps {
  machine: string;
  listing: Listing;
  children: preact.ComponentChildren;
}

function DropZone({ machine, listing, children }: DropZoneProps) {
  const [over, setOver] = useState(false);
  const [reading, setReading] = useState(false);
  /** The dropped files and the folder onto which they were dropped. Another folder may be open once they are read. */
  const [dropped, setDropped] = useState<Pick<SendingProps, 'listing' | 'files'> | undefined>(undefined);
  const drop = async (event: DragEvent): Promise<void> => {
    event.preventDefault();
    setOver(false);
    const items = event.dataTransfer?.items;
    if (!items) return;
    setReading(true);
    await attempt(async () => setDropped({ listing, files: await droppedFiles(items) }));
    setReading(false);
  };
  if (!may('files:write')) return <div class="drop-zone">{children}</div>;
  return (
    <div
      class={over ? 'drop-zone over' : 'drop-zone'}
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={(event) => {
        const inside =
          event.relatedTarget instanceof Node && event.currentTarget.contains(event.relatedTarget);
        if (!inside) setOver(false);
      }}
      onDrop={(event) => void drop(event)}
    >
      {reading && <Placeholder rows={1} />}
      {children}
      {over && <p class="drop-hint">Drop files and folders to upload them here</p>}
      {dropped && <Sending machine={machine} {...dropped} close={() => setDropped(undefined)} />}
    </div>
  );
}

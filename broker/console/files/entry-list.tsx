// The list of entries of a folder: opens entries by a click or key, selects several, and has buttons for
// actions on them.
import { useEffect, useRef, useState } from 'preact/hooks';
import { bytesText } from '../format-times-and-sizes.ts';
import { may } from '../login-state.ts';
import { Button, ButtonLink, IconButton } from '../parts/button.tsx';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { Ago } from '../parts/small-components.tsx';
import { actions, type Column, List } from '../parts/table-and-paged-list.tsx';
import { TransferEntries } from './copy-or-move-dialog.tsx';
import { type EntryActions, focusFirst, onEntryKey } from './entry-list-keys.ts';
import { RemoveEntries, RenameEntry } from './file-dialogs.tsx';
import {
  baseOf,
  downloadAddress,
  type FileEntry,
  goToPath,
  isEditable,
  isFolder,
  type Listing,
  nameToRead,
} from './paths.ts';
import { Permissions, wholeMode } from './permissions-dialog.tsx';

interface EntryListProps {
  machine: string;
  listing: Listing;
  reload: () => void;
}

type Action = 'rename' | 'transfer' | 'permissions' | 'remove';

/** The selected entries. A change of the folder clears the selection. */
function useChosen(files: readonly FileEntry[], folder: string) {
  const [chosen, setChosen] = useState<ReadonlySet<string>>(new Set());
  const clear = (): void => setChosen(new Set());
  useEffect(clear, [folder]);
  const selected = files.filter(({ path }) => chosen.has(path));
  return {
    selected,
    has: ({ path }: FileEntry): boolean => chosen.has(path),
    isAll: selected.length === files.length,
    clear,
    all: () => setChosen(new Set(files.map(({ path }) => path))),
    toggle({ path }: FileEntry): void {
      const next = new Set(chosen);
      if (!next.delete(path)) next.add(path);
      setChosen(next);
    },
  };
}

type Chosen = ReturnType<typeof useChosen>;

export function EntryList({ machine, listing: { files, path: folder }, reload }: EntryListProps) {
  const [open, setOpen] = useState<{ what: Action; entries: readonly FileEntry[] } | undefined>(undefined);
  const chosen = useChosen(files, folder);
  const { selected, toggle, clear } = chosen;
  const frame = useRef<HTMLDivElement>(null);
  const before = useRef(folder);
  useEffect(() => {
    if (before.current !== folder) focusFirst(frame.current);
    before.current = folder;
  }, [folder]);
  if (files.length === 0) return <EmptyFolder />;
  const act = (what: Action, entries: readonly FileEntry[]): void => setOpen({ what, entries });
  const at = (index: number): readonly FileEntry[] => files.slice(index, index + 1);
  const keys: EntryActions = {
    toggle: (index) => at(index).forEach(toggle),
    rename: (index) => may('files:write') && act('rename', at(index)),
    remove: (index) => may('files:write') && act('remove', selected.length > 0 ? selected : at(index)),
  };
  return (
    <>
      <div class="entries" ref={frame} onKeyDown={(event) => onEntryKey(event, folder, keys)}>
        <List
          label="Entries"
          columns={columnsOf(machine, chosen, act)}
          items={files}
          keyOf={({ path }) => path}
          isSelected={chosen.has}
        />
      </div>
      {selected.length > 0 && (
        <SelectedEntries count={selected.length} act={(what) => act(what, selected)} clear={clear} />
      )}
      {open && <EntryDialog {...open} {...{ machine, folder, reload }} close={() => setOpen(undefined)} />}
    </>
  );
}

function EmptyFolder() {
  return (
    <Empty icon={icons.folder} title="This folder is empty">
      <p>
        {may('files:write')
          ? 'Drop files and folders here to upload them. To list hidden files, set the checkbox above.'
          : 'To list hidden files, set the checkbox above.'}
      </p>
    </Empty>
  );
}

interface EntryDialogProps {
  what: Action;
  entries: readonly FileEntry[];
  machine: string;
  folder: string;
  reload: () => void;
  close: () => void;
}

function EntryDialog({ what, entries, folder, ...shared }: EntryDialogProps) {
  const [first] = entries;
  if (what === 'remove') return <RemoveEntries {...shared} entries={entries} />;
  if (what === 'permissions') return <Permissions {...shared} entries={entries} />;
  if (what === 'transfer') return <TransferEntries {...shared} folder={folder} entries={entries} />;
  return first ? <RenameEntry {...shared} folder={folder} entry={first} /> : null;
}

interface SelectedProps {
  count: number;
  act: (what: Action) => void;
  clear: () => void;
}

function SelectedEntries({ count, act, clear }: SelectedProps) {
  return (
    <section class="selection" aria-label="Selected entries">
      <strong>{count} selected</strong>
      <Button icon={icons.copy} press={() => act('transfer')}>
        <span class="phone-off">Copy or move</span>
        <span class="phone-only">Copy</span>
      </Button>
      <IconButton icon={icons.lock} label="Permissions" class="" press={() => act('permissions')} />
      <IconButton icon={icons.trash} label="Delete" class="danger" press={() => act('remove')} />
      <Button text="Clear" press={clear} />
    </section>
  );
}

interface EntryProps {
  machine: string;
  entry: FileEntry;
  act: (what: Action, entries: readonly FileEntry[]) => void;
}

const columnsOf = (
  machine: string,
  chosen: Chosen,
  act: EntryProps['act'],
): (Column<FileEntry> | false)[] => [
  may('files:write') && [
    <SelectAll key="all" chosen={chosen} />,
    (entry) => (
      <input
        type="checkbox"
        aria-label={`Select ${nameToRead(entry)}`}
        checked={chosen.has(entry)}
        onChange={() => chosen.toggle(entry)}
      />
    ),
    'check-cell',
  ],
  [
    'Name',
    (entry, index) => (
      <span class="entry">
        <Icon of={isFolder(entry) ? icons.folder : icons.file} />
        <EntryName machine={machine} entry={entry} index={index} />
        {entry.link_target !== undefined && <span class="muted cut">→ {entry.link_target}</span>}
        {entry.special !== undefined && <span class="tag">{entry.special}</span>}
      </span>
    ),
    'wide',
  ],
  ['Size', (entry) => !isFolder(entry) && bytesText(entry.size ?? 0), 'right number'],
  [
    'Mode',
    (entry) =>
      may('files:write') ? (
        <Button
          text={wholeMode(entry)}
          class="link"
          aria-label={`Permissions of ${nameToRead(entry)}: ${wholeMode(entry)}`}
          title="Change permissions"
          press={() => act('permissions', [entry])}
        />
      ) : (
        wholeMode(entry)
      ),
    'mono muted phone-off',
  ],
  ['Owner', ({ owner, group }) => (group === owner ? owner : `${owner}:${group}`), 'muted phone-off'],
  ['Changed', ({ modified_at }) => <Ago at={modified_at} />, 'muted phone-off'],
  [actions, (entry) => <EntryButtons machine={machine} entry={entry} act={act} />, 'row-buttons'],
];

function SelectAll({ chosen: { selected, isAll, all, clear } }: { chosen: Chosen }) {
  return (
    <input
      type="checkbox"
      aria-label="Select all entries"
      checked={isAll}
      indeterminate={selected.length > 0 && !isAll}
      onChange={isAll ? clear : all}
    />
  );
}

interface EntryNameProps {
  machine: string;
  entry: FileEntry;
  /** The index of the entry in the list of a folder; undefined in other lists. */
  index?: number;
}

/** The name of an entry. A click opens a folder, opens a small file in the editor, and downloads any other file. */
export function EntryName({ machine, entry, index }: EntryNameProps) {
  const name = nameToRead(entry);
  if (entry.name_encoding === undefined && (isFolder(entry) || isEditable(entry))) {
    const place = isFolder(entry) ? { path: entry.path } : { edit: entry.path };
    return <Button text={name} class="link cut" data-entry={index} press={() => goToPath(place)} />;
  }
  if (isFolder(entry) || entry.special !== undefined) return <span class="cut">{name}</span>;
  return (
    <a class="cut" data-entry={index} href={downloadAddress(machine, entry)} download={baseOf(name)}>
      {name}
    </a>
  );
}

function EntryButtons({ machine, entry, act }: EntryProps) {
  const name = nameToRead(entry);
  return (
    <>
      {entry.special === undefined && (
        <ButtonLink
          icon={icons.download}
          class="quiet icon-only"
          href={downloadAddress(machine, entry)}
          download={isFolder(entry) ? `${name}.tar.gz` : name}
          aria-label={`Download ${name}`}
          title={isFolder(entry) ? 'Download as tar.gz' : 'Download'}
        />
      )}
      {may('files:write') && (
        <>
          <IconButton
            icon={icons.edit}
            label={`Rename ${name}`}
            title="Rename (F2)"
            disabled={entry.name_encoding !== undefined}
            press={() => act('rename', [entry])}
          />
          <IconButton
            icon={icons.copy}
            label={`Copy or move ${name}`}
            title="Copy or move, also to another machine"
            class="quiet phone-off"
            press={() => act('transfer', [entry])}
          />
          <IconButton
            icon={icons.trash}
            label={`Delete ${name}`}
            title="Delete"
            class="quiet phone-off"
            press={() => act('remove', [entry])}
          />
        </>
      )}
    </>
  );
}

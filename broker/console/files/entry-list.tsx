// The list of entries of a folder: opens entries by a click or key, selects several, and has buttons for
// actions on them.
import { useEffect, useRef, useState } from 'preact/hooks';
import type { client } from '../api-client.ts';
import { may } from '../login-session.ts';
import { Icon } from '../parts/icon.tsx';
import { IconButton } from '../parts/icon-button.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/page.tsx';
import { actions, type Column, List } from '../parts/paged-list.tsx';
import { Ago } from '../parts/small-components.tsx';
import { bytesText } from '../time.ts';
import { type EntryActions, focusFirst, onEntryKey } from './entry-list-keys.ts';
import { RemoveEntries, RenameEntry } from './file-dialogs.tsx';
import { downloadAddress, type FileEntry, goToPath, isEditable, nameToRead } from './paths.ts';
import { Permissions, wholeMode } from './permissions-dialog.tsx';
import { TransferEntries } from './transfer-dialog.tsx';

interface EntryListProps {
  machine: string;
  listing: Awaited<ReturnType<typeof client.files.list>>;
  reload: () => void;
}

type Action = 'rename' | 'transfer' | 'permissions' | 'remove';

/** The entries that are selected. The selection is empty after a change of the folder. */
function useChosen(files: readonly FileEntry[], folder: string) {
  const [chosen, setChosen] = useState<ReadonlySet<string>>(new Set());
  const clear = (): void => setChosen(new Set());
  useEffect(clear, [folder]);
  return {
    selected: files.filter(({ path }) => chosen.has(path)),
    clear,
    all: () => setChosen(new Set(files.map(({ path }) => path))),
    toggle({ path }: FileEntry): void {
      const next = new Set(chosen);
      if (!next.delete(path)) next.add(path);
      setChosen(next);
    },
  };
}

export function EntryList({ machine, listing: { files, path: folder }, reload }: EntryListProps) {
  const [open, setOpen] = useState<{ what: Action; entries: readonly FileEntry[] } | undefined>(undefined);
  const { selected, toggle, all, clear } = useChosen(files, folder);
  const frame = useRef<HTMLDivElement>(null);
  const before = useRef(folder);
  useEffect(() => {
    if (before.current !== folder) focusFirst(frame.current);
    before.current = folder;
  }, [folder]);
  if (files.length === 0) return <EmptyFolder />;
  const act = (what: Action, entries: readonly FileEntry[]): void => setOpen({ what, entries });
  const at = (index: number): readonly FileEntry[] => files.slice(index, index + 1);
  const isSelected = new Set(selected);
  const isAll = selected.length === files.length;
  const columns = columnsOf(isAll, selected.length > 0, isAll ? clear : all);
  const keys: EntryActions = {
    toggle: (index) => at(index).forEach(toggle),
    rename: (index) => may('files:write') && act('rename', at(index)),
    remove: (index) => may('files:write') && act('remove', selected.length > 0 ? selected : at(index)),
  };
  return (
    <>
      <div class="entries" ref={frame} onKeyDown={(event) => onEntryKey(event, folder, keys)}>
        <List label="Entries" columns={columns}>
          {files.map((entry, index) => (
            <Entry
              key={entry.path}
              machine={machine}
              entry={entry}
              index={index}
              isChosen={isSelected.has(entry)}
              toggle={() => toggle(entry)}
              act={(what) => act(what, [entry])}
            />
          ))}
        </List>
      </div>
      {selected.length > 0 && (
        <SelectedEntries count={selected.length} act={(what) => act(what, selected)} clear={clear} />
      )}
      {open && <EntryDialog {...open} {...{ machine, folder, reload }} close={() => setOpen(undefined)} />}
    </>
  );
}

function columnsOf(all: boolean, some: boolean, press: () => void): Column[] {
  const box = (
    <input
      type="checkbox"
      aria-label="Select all entries"
      checked={all}
      indeterminate={some && !all}
      onChange={press}
    />
  );
  return [
    may('files:write') && [box, 'check-cell'],
    ['Name', 'wide'],
    ['Size', 'right'],
    ['Mode', 'phone-off'],
    ['Owner', 'phone-off'],
    ['Changed', 'phone-off'],
    actions,
  ];
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
      <button type="button" onClick={() => act('transfer')}>
        <Icon of={icons.copy} />
        <span class="phone-off">Copy or move</span>
        <span class="phone-only">Copy</span>
      </button>
      <IconButton icon={icons.lock} label="Permissions" class="" press={() => act('permissions')} />
      <IconButton icon={icons.trash} label="Delete" class="danger" press={() => act('remove')} />
      <button type="button" onClick={clear}>
        Clear
      </button>
    </section>
  );
}

interface EntryProps {
  machine: string;
  entry: FileEntry;
  index: number;
  isChosen: boolean;
  toggle: () => void;
  act: (what: Action) => void;
}

function Entry({ machine, entry, index, isChosen, toggle, act }: EntryProps) {
  const { type, size = 0, owner, group, modified_at, link_target, special } = entry;
  const name = nameToRead(entry);
  const isFolder = type === 'directory';
  return (
    <tr aria-selected={isChosen}>
      {may('files:write') && (
        <td class="check-cell">
          <input type="checkbox" aria-label={`Select ${name}`} checked={isChosen} onChange={toggle} />
        </td>
      )}
      <td class="wide">
        <span class="entry">
          <Icon of={isFolder ? icons.folder : icons.file} />
          <EntryName machine={machine} entry={entry} index={index} />
          {link_target !== undefined && <span class="muted cut">→ {link_target}</span>}
          {special !== undefined && <span class="tag">{special}</span>}
        </span>
      </td>
      <td class="right number">{isFolder ? '' : bytesText(size)}</td>
      <td class="mono muted phone-off">
        {may('files:write') ? (
          <button
            type="button"
            class="link"
            aria-label={`Permissions of ${name}: ${wholeMode(entry)}`}
            title="Change permissions"
            onClick={() => act('permissions')}
          >
            {wholeMode(entry)}
          </button>
        ) : (
          wholeMode(entry)
        )}
      </td>
      <td class="muted phone-off">
        {owner}
        {group !== owner && `:${group}`}
      </td>
      <td class="muted phone-off">
        <Ago at={modified_at} />
      </td>
      <td class="row-buttons">
        <EntryButtons machine={machine} entry={entry} act={act} />
      </td>
    </tr>
  );
}

/** The name of an entry. A click opens a folder, edits a text file, and downloads any other entry. */
function EntryName({ machine, entry, index }: Pick<EntryProps, 'machine' | 'entry' | 'index'>) {
  const name = nameToRead(entry);
  const isFolder = entry.type === 'directory';
  if (entry.name_encoding === undefined && (isFolder || isEditable(entry))) {
    return (
      <button
        type="button"
        class="link cut"
        data-entry={index}
        onClick={() => goToPath(isFolder ? { path: entry.path } : { edit: entry.path })}
      >
        {name}
      </button>
    );
  }
  if (isFolder || entry.special !== undefined) return <span class="cut">{name}</span>;
  return (
    <a class="cut" data-entry={index} href={downloadAddress(machine, entry)} download={name}>
      {name}
    </a>
  );
}

function EntryButtons({ machine, entry, act }: Pick<EntryProps, 'machine' | 'entry' | 'act'>) {
  const name = nameToRead(entry);
  const isFolder = entry.type === 'directory';
  return (
    <>
      {entry.special === undefined && (
        <a
          class="button quiet icon-only"
          href={downloadAddress(machine, entry)}
          download={isFolder ? `${name}.tar.gz` : name}
          aria-label={`Download ${name}`}
          title={isFolder ? 'Download as tar.gz' : 'Download'}
        >
          <Icon of={icons.download} />
        </a>
      )}
      {may('files:write') && (
        <>
          <IconButton
            icon={icons.edit}
            label={`Rename ${name}`}
            title="Rename (F2)"
            disabled={entry.name_encoding !== undefined}
            press={() => act('rename')}
          />
          <IconButton
            icon={icons.copy}
            label={`Copy or move ${name}`}
            title="Copy or move, also to another machine"
            class="quiet phone-off"
            press={() => act('transfer')}
          />
          <IconButton
            icon={icons.trash}
            label={`Delete ${name}`}
            title="Delete"
            class="quiet phone-off"
            press={() => act('remove')}
          />
        </>
      )}
    </>
  );
}

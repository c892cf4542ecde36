// The entries of a folder, with a click to open and buttons for the rest.
import { useState } from 'preact/hooks';
import type { client } from '../client.ts';
import { Ago } from '../parts/basics.tsx';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { List } from '../parts/lists.tsx';
import { Empty } from '../parts/page.tsx';
import { setQuery } from '../routes.ts';
import { may } from '../session.ts';
import { bytesText } from '../time.ts';
import { ChangeEntry, RemoveEntry } from './file-dialogs.tsx';
import { downloadAddress, type FileEntry, nameToRead } from './paths.ts';

interface EntryListProps {
  machine: string;
  listing: Awaited<ReturnType<typeof client.files.list>>;
  reload: () => void;
}

/** Largest file that the editor opens. */
const mostToEdit = 2 * 1024 * 1024;

export function EntryList({ machine, listing: { files, path: folder }, reload }: EntryListProps) {
  const [open, setOpen] = useState<{ what: 'change' | 'remove'; entry: FileEntry } | undefined>(undefined);
  const close = (): void => setOpen(undefined);
  if (files.length === 0) {
    return (
      <Empty icon={icons.folder} title="This folder is empty">
        <p>
          {may('files:write')
            ? 'Drop files and folders here to upload them.'
            : 'Hidden files are not listed.'}
        </p>
      </Empty>
    );
  }
  return (
    <>
      <List
        label="Entries"
        head={
          <>
            <th class="wide">Name</th>
            <th class="right">Size</th>
            <th class="phone-off">Mode</th>
            <th class="phone-off">Owner</th>
            <th class="phone-off">Changed</th>
            <th>
              <span class="only-read">Actions</span>
            </th>
          </>
        }
      >
        {files.map((entry) => (
          <Entry key={entry.path} machine={machine} entry={entry} open={(what) => setOpen({ what, entry })} />
        ))}
      </List>
      {open?.what === 'change' && (
        <ChangeEntry machine={machine} folder={folder} entry={open.entry} close={close} reload={reload} />
      )}
      {open?.what === 'remove' && (
        <RemoveEntry machine={machine} entry={open.entry} close={close} reload={reload} />
      )}
    </>
  );
}

interface EntryProps {
  machine: string;
  entry: FileEntry;
  open: (what: 'change' | 'remove') => void;
}

function Entry({ machine, entry, open }: EntryProps) {
  const { type, size = 0, mode, owner, group, modified_at, link_target, special, name_encoding } = entry;
  const name = nameToRead(entry);
  const isFolder = type === 'directory';
  const isText = !isFolder && special === undefined && size <= mostToEdit && name_encoding === undefined;
  const canOpen = name_encoding === undefined && (isFolder || isText);
  return (
    <tr>
      <td class="wide">
        <span class="entry">
          <Icon of={isFolder ? icons.folder : icons.file} />
          {canOpen ? (
            <button
              type="button"
              class="link cut"
              onClick={() => setQuery(isFolder ? { path: entry.path } : { edit: entry.path })}
            >
              {name}
            </button>
          ) : (
            <span class="cut">{name}</span>
          )}
          {link_target !== undefined && <span class="muted cut">→ {link_target}</span>}
          {special !== undefined && <span class="tag">{special}</span>}
        </span>
      </td>
      <td class="right number">{isFolder ? '' : bytesText(size)}</td>
      <td class="mono muted phone-off">{mode}</td>
      <td class="muted phone-off">
        {owner}
        {group !== owner && `:${group}`}
      </td>
      <td class="muted phone-off">
        <Ago at={modified_at} />
      </td>
      <td class="row-buttons">
        <EntryActions machine={machine} entry={entry} open={open} />
      </td>
    </tr>
  );
}

function EntryActions({ machine, entry, open }: EntryProps) {
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
          <button
            type="button"
            class="quiet icon-only"
            aria-label={`Rename ${name}`}
            title="Rename, move, change the mode"
            disabled={entry.name_encoding !== undefined}
            onClick={() => open('change')}
          >
            <Icon of={icons.edit} />
          </button>
          <button
            type="button"
            class="quiet icon-only"
            aria-label={`Delete ${name}`}
            title="Delete"
            onClick={() => open('remove')}
          >
            <Icon of={icons.trash} />
          </button>
        </>
      )}
    </>
  );
}

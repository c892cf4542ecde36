// Dialogs for files: new folder, rename and delete.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { TextField } from '../parts/form.tsx';
import { FormDialog } from '../parts/form-draft-and-dialog.tsx';
import { Confirm } from '../parts/small-components.tsx';
import { say } from '../parts/toasts.tsx';
import { type FileEntry, hasContent, joined, nameToRead, pathOf } from './paths.ts';

export interface DialogProps {
  machine: string;
  close: () => void;
  reload: () => void;
}

export function NewFolder({ machine, folder, close, reload }: DialogProps & { folder: string }) {
  const [name, setName] = useState('');
  return (
    <FormDialog
      title="New folder"
      submit="Create"
      close={close}
      disabled={name === ''}
      run={() => client.files.mkdir({ machine_id: machine, path: joined(folder, name), parents: true })}
      done={reload}
    >
      <TextField
        label="Name"
        value={name}
        change={setName}
        hint="Use a slash to create a folder inside another one"
        required
        autoFocus
      />
    </FormDialog>
  );
}

/** Renames an entry. A new name that contains a slash moves the entry to another folder of its machine. */
export function RenameEntry({
  machine,
  folder,
  entry,
  close,
  reload,
}: DialogProps & { folder: string; entry: FileEntry }) {
  const [name, setName] = useState(entry.name);
  return (
    <FormDialog
      title={`Rename ${entry.name}`}
      submit="Rename"
      close={close}
      disabled={name === '' || name === entry.name}
      run={() => {
        const destination = name.startsWith('/') ? name : joined(folder, name);
        return client.files.move({ machine_id: machine, source: entry.path, destination });
      }}
      done={reload}
    >
      <TextField label="Name" value={name} change={setName} required autoFocus />
    </FormDialog>
  );
}

export function RemoveEntries({
  machine,
  entries,
  close,
  reload,
}: DialogProps & { entries: readonly FileEntry[] }) {
  const [only] = entries;
  const what = entries.length === 1 && only ? nameToRead(only) : `${entries.length} entries`;
  const folders = entries.some(hasContent);
  return (
    <Confirm
      title={`Delete ${what}?`}
      action={folders ? 'Delete with its content' : 'Delete'}
      onClose={close}
      run={async () => {
        try {
          for (const entry of entries)
            await client.files.remove({
              machine_id: machine,
              ...pathOf(entry),
              recursive: hasContent(entry),
            });
          say(`${what} deleted`);
        } finally {
          reload();
        }
      }}
    >
      {entries.length > 1 && <Names names={entries.map(nameToRead)} />}
      <p>{folders ? 'Folders and everything in them are deleted for good.' : 'This cannot be undone.'}</p>
    </Confirm>
  );
}

const mostNames = 8;

export function Names({ names }: { names: readonly string[] }) {
  return (
    <ul class="names">
      {names.slice(0, mostNames).map((name) => (
        <li key={name}>{name}</li>
      ))}
      {names.length > mostNames && <li>and {names.length - mostNames} more</li>}
    </ul>
  );
}

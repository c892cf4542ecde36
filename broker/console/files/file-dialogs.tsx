// Dialogs about files: a new folder, rename and mode, delete, and the question before files are replaced.
import { useState } from 'preact/hooks';
import { client } from '../client.ts';
import { Confirm, Dialog } from '../parts/basics.tsx';
import { Form, TextField } from '../parts/form.tsx';
import { say } from '../parts/toasts.tsx';
import { type FileEntry, joined, nameToRead, pathOf } from './paths.ts';

interface DialogProps {
  machine: string;
  close: () => void;
  reload: () => void;
}

export function NewFolder({ machine, folder, close, reload }: DialogProps & { folder: string }) {
  const [name, setName] = useState('');
  return (
    <Dialog title="New folder" onClose={close}>
      <Form
        submit="Create"
        cancel={close}
        disabled={name === ''}
        run={async () => {
          await client.files.mkdir({ machine_id: machine, path: joined(folder, name), parents: true });
          reload();
          close();
        }}
      >
        <TextField
          label="Name"
          value={name}
          change={setName}
          hint="With slashes also folders inside of it"
          required
          autoFocus
        />
      </Form>
    </Dialog>
  );
}

/** Renames or moves an entry, and changes its mode. */
export function ChangeEntry({
  machine,
  folder,
  entry,
  close,
  reload,
}: DialogProps & { folder: string; entry: FileEntry }) {
  const [name, setName] = useState(entry.name);
  const [mode, setMode] = useState(entry.mode);
  const save = async (): Promise<void> => {
    const path = joined(folder, entry.name);
    const destination = name.startsWith('/') ? name : joined(folder, name);
    if (mode !== entry.mode) await client.files.change({ machine_id: machine, path, mode });
    if (destination !== path) await client.files.move({ machine_id: machine, source: path, destination });
    reload();
    close();
  };
  return (
    <Dialog title={`Change ${entry.name}`} onClose={close}>
      <Form submit="Save" cancel={close} run={save} disabled={name === ''}>
        <TextField
          label="Name"
          value={name}
          change={setName}
          hint="A whole path moves it there"
          required
          autoFocus
        />
        <TextField
          label="Mode"
          value={mode}
          change={setMode}
          hint="Permission bits in octal, such as 0644"
          mono
        />
      </Form>
    </Dialog>
  );
}

export function RemoveEntry({ machine, entry, close, reload }: DialogProps & { entry: FileEntry }) {
  const isFolder = entry.type === 'directory' && entry.link_target === undefined;
  const name = nameToRead(entry);
  return (
    <Confirm
      title={`Delete ${name}?`}
      action={isFolder ? 'Delete with its content' : 'Delete'}
      onClose={close}
      run={async () => {
        await client.files.remove({ machine_id: machine, ...pathOf(entry), recursive: isFolder });
        say(`${name} is deleted`);
        reload();
      }}
    >
      <p>
        {isFolder ? 'The folder and everything in it are deleted for good.' : 'The file is deleted for good.'}
      </p>
    </Confirm>
  );
}

const mostNames = 8;

export function ReplaceDialog({
  names,
  close,
  run,
}: {
  names: readonly string[];
  close: () => void;
  run: () => void;
}) {
  return (
    <Confirm
      title={names.length === 1 ? `Replace ${names[0]}?` : `Replace ${names.length} files or folders?`}
      action="Replace"
      onClose={close}
      run={() => Promise.resolve(run())}
    >
      <p>These are here already. Of a folder, files that have the same names are replaced:</p>
      <ul class="names">
        {names.slice(0, mostNames).map((name) => (
          <li key={name}>{name}</li>
        ))}
        {names.length > mostNames && <li>and {names.length - mostNames} more</li>}
      </ul>
    </Confirm>
  );
}

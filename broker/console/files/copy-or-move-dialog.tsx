// The dialog that copies or moves entries on a machine, or to another one.
import { useEffect, useRef, useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { MachineField } from '../machines/machine-picker.tsx';
import { CheckField, TextField } from '../parts/form.tsx';
import { FormDialog } from '../parts/form-draft-and-dialog.tsx';
import { Choice } from '../parts/small-components.tsx';
import { say } from '../parts/toasts.tsx';
import type { DialogProps } from './file-dialogs.tsx';
import { destinationIn, type FileEntry, hasContent, joined, nameToRead, pathOf } from './paths.ts';

const ways = [
  ['copy', 'Copy'],
  ['move', 'Move'],
] as const;
type Way = (typeof ways)[number][0];

interface Transfer {
  way: Way;
  from: string;
  to: string;
  entry: FileEntry;
  destination: string;
  destination_encoding?: 'base64';
  overwrite: boolean;
}

/** Copies or moves one entry. A move to another machine is a copy, checked by SHA-256, and then a removal. */
async function transfer({ way, from, to, entry, ...there }: Transfer, signal: AbortSignal): Promise<void> {
  const { path: source, path_encoding } = pathOf(entry);
  const what = {
    machine_id: from,
    source,
    ...(path_encoding && { source_encoding: path_encoding }),
    ...there,
  };
  if (way === 'move' && from === to) await client.files.move(what, { signal });
  else await client.files.copy({ ...what, destination_machine_id: to }, { signal });
  if (way === 'copy' || from === to) return;
  await client.files.remove({ machine_id: from, ...pathOf(entry), recursive: hasContent(entry) }, { signal });
}

interface TransferProps extends DialogProps {
  folder: string;
  entries: readonly FileEntry[];
}

export function TransferEntries({ machine, folder, entries, close, reload }: TransferProps) {
  const [only] = entries;
  const single = entries.length === 1 && only !== undefined && only.name_encoding === undefined;
  const [way, setWay] = useState<Way>('copy');
  const [to, setTo] = useState(machine);
  const [path, setPath] = useState(single ? joined(folder, only.name) : folder);
  const [overwrite, setOverwrite] = useState(false);
  const [done, setDone] = useState<number | undefined>(undefined);
  const stop = useRef(new AbortController());
  useEffect(() => () => stop.current.abort(), []);
  const run = async (): Promise<void> => {
    try {
      for (const [index, entry] of entries.entries()) {
        setDone(index);
        const there = single && !path.endsWith('/') ? { destination: path } : destinationIn(path, entry);
        await transfer({ way, from: machine, to, entry, ...there, overwrite }, stop.current.signal);
      }
    } finally {
      setDone(undefined);
      reload();
    }
    const what = single ? path : `${entries.length} entries`;
    say(`${what} ${way === 'copy' ? 'copied' : 'moved'}`);
  };
  const unchanged = single && to === machine && path === only.path;
  return (
    <FormDialog
      title={`Copy or move ${single ? only.name : `${entries.length} entries`}`}
      submit={way === 'copy' ? 'Copy' : 'Move'}
      close={close}
      run={run}
      disabled={!path.startsWith('/') || unchanged}
    >
      <Choice label="What to do" options={ways} value={way} choose={setWay} />
      <MachineField
        before={to === machine ? 'On this machine' : 'To the machine'}
        machine={to}
        choose={setTo}
      />
      <TextField
        label={single ? 'Path there' : 'Folder there'}
        value={path}
        change={setPath}
        hint={
          single
            ? `A path that ends with / is a folder, into which ${only.name} is put`
            : 'The entries are put into this folder'
        }
        mono
        required
      />
      <CheckField label="Replace files that exist" value={overwrite} change={setOverwrite} />
      {done !== undefined && <Progress done={done} entries={entries} />}
    </FormDialog>
  );
}

function Progress({ done, entries }: { done: number; entries: readonly FileEntry[] }) {
  return (
    <p class="muted" role="status">
      {done + 1} of {entries.length}: {entries[done] && nameToRead(entries[done])}
    </p>
  );
}

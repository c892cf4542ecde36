// Permissions of entries: the bits as checkboxes and in octal, the owner and the group.
import { client } from '../api-client.ts';
import { TextField } from '../parts/form.tsx';
import { FormDialog, useDraft } from '../parts/form-draft-and-dialog.tsx';
import type { DialogProps } from './file-dialogs.tsx';
import { type FileEntry, isFolder, nameToRead, pathOf } from './paths.ts';

const classes = [
  ['Owner', 6],
  ['Group', 3],
  ['Others', 0],
] as const;
const rights = [
  ['Read', 4],
  ['Write', 2],
  ['Execute', 1],
] as const;

/** Returns the mode including the special bits, which a listing contains as separate fields. */
export function wholeMode({ mode, setuid, setgid, sticky }: FileEntry): string {
  return `${(setuid ? 4 : 0) + (setgid ? 2 : 0) + (sticky ? 1 : 0)}${mode.slice(-3)}`;
}

/** Returns the value that all entries have, or '' if they differ. */
function commonOf(values: readonly string[]): string {
  const [first = ''] = values;
  return values.every((value) => value === first) ? first : '';
}

interface PermissionsProps extends DialogProps {
  entries: readonly FileEntry[];
}

export function Permissions({ machine, entries, close, reload }: PermissionsProps) {
  const before = {
    mode: commonOf(entries.map(wholeMode)),
    owner: commonOf(entries.map(({ owner }) => owner)),
    group: commonOf(entries.map(({ group }) => group)),
  };
  const { draft, bind } = useDraft(before);
  const { mode, owner, group } = draft;
  const isMode = /^[0-7]{3,4}$/.test(mode);
  const changes = {
    ...(mode !== before.mode && { mode }),
    ...(owner !== before.owner && { owner }),
    ...(group !== before.group && { group }),
  };
  const isValid = (isMode || mode === before.mode) && !Object.values(changes).includes('');
  const save = async (): Promise<void> => {
    try {
      for (const entry of entries)
        await client.files.change({ machine_id: machine, ...pathOf(entry), ...changes });
    } finally {
      reload();
    }
  };
  const [first, ...others] = entries;
  const title = first && others.length === 0 ? nameToRead(first) : `${entries.length} entries`;
  return (
    <FormDialog
      title={`Permissions of ${title}`}
      submit="Save"
      close={close}
      run={save}
      disabled={!isValid || Object.keys(changes).length === 0}
    >
      <Bits mode={isMode ? mode : '0'} change={bind('mode').change} />
      <div class="fields">
        <TextField label="In octal" {...bind('mode')} mono numeric />
        <TextField label="Owner" {...bind('owner')} />
        <TextField label="Group" {...bind('group')} />
      </div>
      <p class="hint">
        {Object.values(before).includes('')
          ? 'A field is empty if its value differs between the entries. '
          : ''}
        {entries.some(isFolder) ? 'Saving changes a folder itself, but not its content. ' : ''}
        To change the owner or group, the agent must run as root.
      </p>
    </FormDialog>
  );
}

function Bits({ mode, change }: { mode: string; change: (mode: string) => void }) {
  const bits = Number.parseInt(mode, 8);
  return (
    <table class="bits">
      <thead>
        <tr>
          <td />
          {rights.map(([right]) => (
            <th key={right} scope="col">
              {right}
            </th>
          ))}
        </tr>
      </thead>
      <tbody>
        {classes.map(([name, shift]) => (
          <tr key={name}>
            <th scope="row">{name}</th>
            {rights.map(([right, bit]) => (
              <td key={right}>
                <input
                  type="checkbox"
                  aria-label={`${name}: ${right.toLowerCase()}`}
                  checked={(bits & (bit << shift)) !== 0}
                  onChange={() => change((bits ^ (bit << shift)).toString(8).padStart(4, '0'))}
                />
              </td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

// Fields that choose what runs, now or by a schedule: a shell line, or a saved command with values of its parameters.
import type { ComponentChildren } from 'preact';
import { client } from '../api-client.ts';
import { may } from '../login-state.ts';
import { SelectField, TextField } from '../parts/form.tsx';
import { editing } from '../parts/form-draft-and-dialog.tsx';
import { Choice } from '../parts/small-components.tsx';
import { useData } from '../parts/use-data.ts';
import { to } from '../router.ts';
import { allowedText, type Parameter, type SavedCommand } from './saved-command-model.ts';

/** What the user has entered in the form: a shell command, or a saved command and its values. */
export interface WhatToRun {
  by: 'line' | 'saved';
  line: string;
  /** Id of the chosen saved command; empty until one is chosen. */
  saved: string;
  values: Readonly<Record<string, string>>;
}

const choices = [
  ['line', 'Command'],
  ['saved', 'Saved command'],
] as const;

/** Loads all saved commands if `wanted` is true. Returns undefined while they load, or if the key may not read them. */
export function useSavedCommands(wanted: boolean): readonly SavedCommand[] | undefined {
  const isNeeded = wanted && may('commands:read');
  const { data } = useData(
    async (signal) => {
      if (!isNeeded) return undefined;
      const all: SavedCommand[] = [];
      for await (const one of client.savedCommands.list({ sort: 'name', limit: 100 }, { signal }))
        all.push(one);
      return all;
    },
    [isNeeded],
  );
  return data;
}

export const isChosen = ({ by, line, saved }: WhatToRun): boolean =>
  (by === 'line' ? line.trim() : saved) !== '';

/** What a request runs: a shell line, or a saved command with its parameters. */
export type Runnable = { command: string } | { saved_command_id: string; parameters: Record<string, string> };

/** Returns the fields of a request. Leaves out empty values, and values of parameters that no longer exist. */
export function runnableOf(what: WhatToRun, all: readonly SavedCommand[] = []): Runnable {
  const { by, line, saved, values } = what;
  if (by === 'line') return { command: line };
  const known = all.find(({ id }) => id === saved)?.parameters;
  const given = Object.entries(values).filter(
    ([name, value]) => value !== '' && (known?.some((one) => one.name === name) ?? true),
  );
  return { saved_command_id: saved, parameters: Object.fromEntries(given) };
}

interface WhatToRunFieldsProps {
  what: WhatToRun;
  set: (changes: Partial<WhatToRun>) => void;
  all: readonly SavedCommand[] | undefined;
  /** The end of the hint below the shell line. The hint begins with `A line for /bin/sh`. */
  hint?: string;
  autoFocus?: boolean;
  children?: ComponentChildren;
}

export function WhatToRunFields({
  what,
  set,
  all,
  hint = '',
  autoFocus = false,
  children,
}: WhatToRunFieldsProps) {
  const { by } = what;
  const { bind } = editing(what, set);
  return (
    <section class="card">
      <div class="card-head spread">
        <h2>What</h2>
        {may('commands:read') && (
          <Choice label="What" options={choices} value={by} choose={(value) => set({ by: value })} />
        )}
      </div>
      <div class="card-body">
        {by === 'saved' ? (
          <SavedCommandFields what={what} set={set} all={all} />
        ) : (
          <TextField
            label="Command"
            {...bind('line')}
            hint={`A line for /bin/sh${hint}`}
            placeholder="df -h /"
            rows={3}
            mono
            required
            autoFocus={autoFocus}
          />
        )}
        {children}
      </div>
    </section>
  );
}

function SavedCommandFields({ what, set, all }: Pick<WhatToRunFieldsProps, 'what' | 'set' | 'all'>) {
  const { saved, values } = what;
  if (all?.length === 0)
    return (
      <p class="hint">
        There is no saved command yet. <a href={to('/saved-commands', 'new')}>Create one</a>, with parameters
        that each run fills in.
      </p>
    );
  const chosen = all?.find(({ id }) => id === saved);
  return (
    <>
      <SelectField
        label="Saved command"
        value={saved}
        options={[['', 'choose one'], ...(all ?? []).map(({ id, name }) => [id, name] as const)]}
        change={(id) => set({ saved: id, values: {} })}
        hint={chosen?.description ?? undefined}
      />
      {chosen?.parameters.map((parameter) => (
        <ParameterField
          key={parameter.name}
          parameter={parameter}
          value={values[parameter.name] ?? ''}
          change={(value) => set({ values: { ...values, [parameter.name]: value } })}
        />
      ))}
    </>
  );
}

interface ParameterFieldProps {
  parameter: Parameter;
  value: string;
  change: (value: string) => void;
}

function ParameterField({ parameter, value, change }: ParameterFieldProps) {
  const { name, type, required, values, default: byDefault, description } = parameter;
  const shared = { label: name, value, change };
  const without = byDefault !== null ? `${byDefault} (default)` : required ? '' : 'left out';
  if (type === 'enum' || type === 'boolean') {
    const options = values ?? ['true', 'false'];
    return (
      <SelectField
        {...shared}
        options={[['', without || 'choose one'], ...options.map((one) => [one, one] as const)]}
        hint={description ?? undefined}
      />
    );
  }
  return (
    <TextField
      {...shared}
      placeholder={without}
      hint={[description, allowedText(parameter)].filter(Boolean).join('. ')}
      numeric={type === 'integer'}
      required={without === ''}
      mono
    />
  );
}

type Bound = Pick<ParameterFieldProps, 'value' | 'change'>;

/** Fields for the folder in which a command runs and for the user as which it runs. */
export function WhereFields({ cwd, user }: { cwd: Bound; user: Bound }) {
  return (
    <>
      <TextField label="Folder" {...cwd} hint="Default: the user’s home" mono />
      <TextField label="User" {...user} hint="Default: the agent’s user" />
    </>
  );
}

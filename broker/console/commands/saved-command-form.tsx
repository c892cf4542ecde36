// The form of a saved command. Each {{name}} in its line gets fields for the parameter of that name.
import { client } from '../api-client.ts';
import { CheckField, Form, SelectField, TextField } from '../parts/form.tsx';
import { type Editing, editing, numberOf, useDraft } from '../parts/form-draft-and-dialog.tsx';
import { go, to } from '../router.ts';
import { secondMs } from '../timers.ts';
import { argvOf, argvText } from './argv-text.ts';
import type { Parameter, SavedCommand } from './saved-command-model.ts';
import { WhereFields } from './what-to-run-fields.tsx';

const types = [
  ['string', 'text'],
  ['enum', 'one of a list of values'],
  ['integer', 'whole number'],
  ['boolean', 'true or false'],
  ['path', 'absolute path'],
] as const;

/** A parameter while it is edited. Numbers are stored as text, and `values` has one allowed value per line. */
interface ParameterDraft {
  type: Parameter['type'];
  optional: boolean;
  byDefault: string;
  values: string;
  pattern: string;
  min: string;
  max: string;
  description: string;
}

interface Draft {
  name: string;
  description: string;
  line: string;
  user: string;
  cwd: string;
  /** Seconds; empty for no timeout. */
  timeout: string;
  parameters: Readonly<Record<string, ParameterDraft>>;
}

const newParameter: ParameterDraft = {
  type: 'string',
  optional: false,
  byDefault: '',
  values: '',
  pattern: '',
  min: '',
  max: '',
  description: '',
};

const draftOfParameter = (parameter: Parameter): ParameterDraft => ({
  type: parameter.type,
  optional: !parameter.required && parameter.default === null,
  byDefault: String(parameter.default ?? ''),
  values: parameter.values?.join('\n') ?? '',
  pattern: parameter.pattern ?? '',
  min: String(parameter.min ?? ''),
  max: String(parameter.max ?? ''),
  description: parameter.description ?? '',
});

const draftOf = (saved: SavedCommand | undefined): Draft => ({
  name: saved?.name ?? '',
  description: saved?.description ?? '',
  line: argvText(saved?.argv ?? []),
  user: saved?.user ?? '',
  cwd: saved?.cwd ?? '',
  timeout: saved?.timeout ? String(saved.timeout / secondMs) : '',
  parameters: Object.fromEntries(saved?.parameters.map((one) => [one.name, draftOfParameter(one)]) ?? []),
});

const namesIn = (line: string): string[] =>
  [...line.matchAll(/\{\{([a-z][a-z0-9_]*)\}\}/g)].map(([, name = '']) => name);

/** Returns the parameter as a request contains it, with only the fields that its type allows. */
function parameterOf(name: string, draft: ParameterDraft) {
  const { type, optional, byDefault, values, pattern, min, max, description } = draft;
  const isText = type === 'string' || type === 'path';
  const isNumber = type === 'integer';
  return {
    ...{ name, type },
    ...(description && { description }),
    ...(byDefault ? { default: byDefault } : { required: !optional }),
    ...(type === 'enum' && { values: values.split('\n').filter((one) => one !== '') }),
    ...(isText && pattern && { pattern }),
    ...(isNumber && min && { min: numberOf(min, `The smallest ${name}`) }),
    ...(isNumber && max && { max: numberOf(max, `The largest ${name}`) }),
  };
}

/** Creates the saved command, or changes the given one. Resolves with its id. */
async function save(
  draft: Draft,
  names: readonly string[],
  saved: SavedCommand | undefined,
): Promise<string> {
  const { name, description, line, user, cwd, timeout, parameters } = draft;
  const seconds = numberOf(timeout, 'The timeout');
  const input = {
    name,
    argv: argvOf(line),
    parameters: names.map((one) => parameterOf(one, parameters[one] ?? newParameter)),
    description: description || null,
    user: user || null,
    cwd: cwd || null,
    timeout: seconds === undefined ? null : Math.round(seconds * secondMs),
  };
  const { id } = saved
    ? await client.savedCommands.update({ saved_command_id: saved.id, ...input })
    : await client.savedCommands.create(input);
  return id;
}

export function SavedCommandForm({ saved }: { saved?: SavedCommand }) {
  const form = useDraft<Draft>(() => draftOf(saved));
  const { draft, set, bind } = form;
  const { name, line, parameters } = draft;
  // A parameter stays in the form even if no argument of the stored command uses it, because schedules may set a value
  // for it.
  const used = namesIn(argvText(saved?.argv ?? []));
  const unused = saved?.parameters.map((one) => one.name).filter((one) => !used.includes(one)) ?? [];
  const names = [...new Set([...namesIn(line), ...unused])];
  return (
    <div class="narrow">
      <Form
        submit={saved ? 'Save' : 'Create'}
        disabled={!name || !line.trim()}
        run={async () => go(to('/saved-commands', await save(draft, names, saved)))}
      >
        <section class="card card-body">
          <TextField label="Name" {...bind('name')} placeholder="restart" required autoFocus={!saved} />
          <TextField
            label="Program and arguments"
            {...bind('line')}
            placeholder="systemctl restart {{unit}}"
            hint="No shell is used. {{name}} stands for the value of a parameter; a value is never split at spaces"
            rows={3}
            mono
            required
          />
          <TextField label="Description" {...bind('description')} rows={2} />
          <SettingFields {...form} />
        </section>
        {names.map((one) => (
          <ParameterCard
            key={one}
            name={one}
            draft={parameters[one] ?? newParameter}
            change={(changed) => set({ parameters: { ...parameters, [one]: changed } })}
          />
        ))}
      </Form>
    </div>
  );
}

function SettingFields({ bind }: Editing<Draft>) {
  return (
    <div class="fields">
      <WhereFields cwd={bind('cwd')} user={bind('user')} />
      <TextField
        label="Timeout in seconds"
        {...bind('timeout')}
        hint="After this time the command is killed with all its processes"
        numeric
      />
    </div>
  );
}

interface ParameterCardProps {
  name: string;
  draft: ParameterDraft;
  change: (draft: ParameterDraft) => void;
}

function ParameterCard({ name, draft, change }: ParameterCardProps) {
  const form = editing(draft, (changes) => change({ ...draft, ...changes }));
  const { bind } = form;
  return (
    <fieldset class="card" aria-label={`Parameter ${name}`}>
      <h2>
        Parameter <code>{name}</code>
      </h2>
      <div class="card-body">
        <div class="fields">
          <SelectField label="Type" {...bind('type')} options={types} />
          <TextField label="Default" {...bind('byDefault')} mono />
          <AllowedFields {...form} />
        </div>
        <TextField label="What it is for" {...bind('description')} />
        {draft.byDefault === '' && (
          <CheckField
            label={`Optional: without a value, the argument {{${name}}} is left out`}
            {...bind('optional')}
          />
        )}
      </div>
    </fieldset>
  );
}

/** Fields that limit the values of a parameter, such as its smallest and largest number. */
function AllowedFields({ draft: { type }, bind }: Editing<ParameterDraft>) {
  if (type === 'enum')
    return <TextField label="Values, one per line" {...bind('values')} rows={3} mono required />;
  if (type === 'integer')
    return (
      <>
        <TextField label="Smallest" {...bind('min')} placeholder="0" numeric />
        <TextField label="Largest" {...bind('max')} numeric />
      </>
    );
  if (type === 'boolean') return null;
  return (
    <TextField
      label="Pattern"
      {...bind('pattern')}
      hint="A regular expression that the whole value must match"
      mono
    />
  );
}

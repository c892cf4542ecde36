// The page that runs a command on one machine, on selected machines, or on all machines with some tags.
import { useEffect } from 'preact/hooks';
import { client } from '../api-client.ts';
import {
  isChosen,
  type Runnable,
  runnableOf,
  useSavedCommands,
  type WhatToRun,
  WhatToRunFields,
  WhereFields,
} from '../commands/what-to-run-fields.tsx';
import { tagsOf } from '../machines/machine-restriction.tsx';
import { clearSelection, selected, selectOnly } from '../machines/selected-machines.ts';
import { TargetFields, type Targets } from '../machines/target-fields.tsx';
import { CheckField, Form, TextField } from '../parts/form.tsx';
import { type Editing, numberOf, useDraft } from '../parts/form-draft-and-dialog.tsx';
import { Page } from '../parts/page.tsx';
import { go, place, to } from '../router.ts';
import { dayMs, secondMs } from '../timers.ts';

interface Options {
  cwd: string;
  user: string;
  timeout: string;
  concurrency: string;
  failures: string;
  queue: boolean;
  /** Text for the standard input of the command. */
  stdin: string;
  /** True if the input stays open, so that the user can write further lines on the command's page. */
  input: boolean;
}

/** Starts the command on the machines. Resolves with the URL of the page about the command or batch. */
async function start(
  runnable: Runnable,
  options: Options,
  ids: readonly string[],
  tags: readonly string[],
): Promise<string> {
  const { cwd, user, timeout, concurrency, failures, queue, stdin, input } = options;
  const seconds = numberOf(timeout, 'The timeout');
  const limits = {
    ...(seconds !== undefined && { timeout: Math.round(seconds * secondMs) }),
    ...(queue && { queue_for: dayMs }),
  };
  const spec = { ...limits, ...(cwd && { cwd }), ...(user && { user }), ...(stdin && { stdin }) };
  const [only, ...others] = ids;
  if ('command' in runnable && tags.length === 0 && only !== undefined && others.length === 0) {
    const one = { machine_id: only, ...runnable, ...spec, ...(input && { input }) };
    return to('/commands', (await client.commands.async(one)).id);
  }
  const atOnce = numberOf(concurrency, 'Machines at once');
  const most = numberOf(failures, 'Allowed failures');
  const batch = {
    ...(tags.length > 0 ? { tags: [...tags] } : { machine_ids: [...ids] }),
    ...(atOnce !== undefined && { concurrency: atOnce }),
    ...(most !== undefined && { max_failures: most }),
    wait: 0,
  };
  const { id } =
    'command' in runnable
      ? await client.batches.create({ ...runnable, ...spec, ...batch })
      : await client.batches.runSaved({ ...runnable, ...limits, ...batch });
  return to('/batches', id);
}

export function Run() {
  const { query } = place.value;
  const given = query.get('tags') ?? '';
  const targets = useDraft<Targets>({ by: given ? 'tags' : 'machines', tags: given });
  const { by, tags } = targets.draft;
  const form = useDraft<Options>(() => ({
    cwd: query.get('cwd') ?? '',
    user: query.get('user') ?? '',
    timeout: '',
    concurrency: '',
    failures: '',
    queue: false,
    stdin: '',
    input: false,
  }));
  const { draft: what, set: setWhat } = useDraft<WhatToRun>({
    by: query.get('saved') ? 'saved' : 'line',
    line: query.get('command') ?? '',
    saved: query.get('saved') ?? '',
    values: {},
  });
  const isSaved = what.by === 'saved';
  const all = useSavedCommands(isSaved);
  const named = query.get('machine');
  useEffect(() => {
    if (named) selectOnly(named.split(','));
  }, [named]);
  const ids = [...selected.value];
  const wantedTags = by === 'tags' ? tagsOf(tags) : [];
  const many = by === 'tags' || ids.length > 1;
  const ready = isChosen(what) && (by === 'tags' ? wantedTags.length > 0 : ids.length > 0);
  return (
    <Page title="Run a command">
      <div class="narrow">
        <Form
          submit={many ? `Run on ${by === 'tags' ? 'all of them' : `${ids.length} machines`}` : 'Run'}
          disabled={!ready}
          run={async () => {
            const address = await start(runnableOf(what, all), form.draft, ids, wantedTags);
            clearSelection();
            go(address);
          }}
        >
          <TargetFields
            {...targets}
            hint="Every machine that has all of these tags when the command starts"
          />
          <WhatToRunFields what={what} set={setWhat} all={all} hint=". Ctrl Enter runs it." autoFocus>
            <MoreOptions form={form} many={many} isSaved={isSaved} />
          </WhatToRunFields>
        </Form>
      </div>
    </Page>
  );
}

interface MoreOptionsProps {
  form: Editing<Options>;
  many: boolean;
  /** True for a saved command. It has its own folder and user and gets no input, so those fields are left out. */
  isSaved: boolean;
}

function MoreOptions({ form, many, isSaved }: MoreOptionsProps) {
  const { draft, bind } = form;
  return (
    <details open={draft.cwd !== '' || draft.user !== ''}>
      <summary>More options</summary>
      <div class="fields">
        {!isSaved && <WhereFields cwd={bind('cwd')} user={bind('user')} />}
        <TextField
          label="Timeout in seconds"
          {...bind('timeout')}
          hint="After this time the command is killed with all its processes"
          numeric
        />
        {many && <BatchOptions {...form} />}
      </div>
      {!isSaved && (
        <TextField
          label="Standard input"
          {...bind('stdin')}
          hint="Text that the command reads; leave empty for no input"
          rows={2}
          mono
        />
      )}
      {!isSaved && !many && (
        <CheckField label="Leave the input open, to write to it on the command’s page" {...bind('input')} />
      )}
      <CheckField label="If a machine is offline, wait a day for it" {...bind('queue')} />
    </details>
  );
}

function BatchOptions({ bind }: Editing<Options>) {
  return (
    <>
      <TextField label="Machines at once" {...bind('concurrency')} hint="Default: all" numeric />
      <TextField
        label="Allowed failures"
        {...bind('failures')}
        hint="If more machines than this fail, the command starts on no further machine. Default: no limit"
        numeric
      />
    </>
  );
}

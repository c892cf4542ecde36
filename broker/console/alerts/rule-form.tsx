// The form of an alert rule: its condition, its machines, and the channels that get its alerts.
import { client } from '../api-client.ts';
import { durationText } from '../format-times-and-sizes.ts';
import { may } from '../login-state.ts';
import { LimitsFields } from '../machines/machine-restriction.tsx';
import { CheckField, CheckFields, SelectField, TextField } from '../parts/form.tsx';
import { type Editing, FormDialog, useDraft } from '../parts/form-draft-and-dialog.tsx';
import { useData } from '../parts/use-data.ts';
import { to } from '../router.ts';
import { dayMs, minuteMs } from '../timers.ts';
import { type Draft, draftOf, saveRule } from './rule-draft.ts';
import { RulePreview } from './rule-preview.tsx';
import { isExpiring, isMeasured, kinds, type Rule } from './rule-texts.ts';

const lastings = [0, 1, 5, 10, 30, 60, 360, 1_440].map((minutes) => minutes * minuteMs);
const repeats = [0, 15, 60, 240, 1_440].map((minutes) => minutes * minuteMs);
const warnings = [1, 3, 7, 14, 30, 60].map((days) => days * dayMs);

/** Returns the options of a field for a duration: `values` and `present`, in ms. `none` is the text for 0. */
function durations(values: readonly number[], present: string, none: string): (readonly [string, string])[] {
  const all = [...new Set([...values, Number(present)])].sort((a, b) => a - b);
  return all.map((ms) => [String(ms), ms === 0 ? none : durationText(ms)] as const);
}

interface RuleFormProps {
  /** The rule to change. If it is undefined, a rule is created. */
  rule?: Rule | undefined;
  close: () => void;
  saved: () => void;
}

export function RuleForm({ rule, close, saved }: RuleFormProps) {
  const form = useDraft<Draft>(() => draftOf(rule));
  const { draft, bind } = form;
  const { name, kind } = draft;
  const badNumber = isMeasured(kind) && !(Number(draft.above) >= 0 && Number(draft.recover) >= 0);
  return (
    <FormDialog
      title={rule ? `Change ${rule.name}` : 'New alert rule'}
      submit={rule ? 'Save' : 'Create'}
      close={close}
      run={() => saveRule(draft, rule)}
      done={saved}
      disabled={!name || badNumber}
    >
      <TextField label="Name" {...bind('name')} placeholder="disk is full" required autoFocus />
      <SelectField
        label="Open an alert when"
        {...bind('kind')}
        options={rule ? kinds.filter(([one]) => one === kind) : kinds}
      />
      <Condition {...form} />
      {!isExpiring(kind) && <LimitsFields {...bind('limits')} />}
      <SelectField
        label="Repeat it"
        {...bind('repeat')}
        options={durations(repeats, draft.repeat, 'never').map(([ms, text]) => [
          ms,
          ms === '0' ? text : `every ${text} until it is acknowledged`,
        ])}
      />
      {may('webhooks:read') && <ChannelChoice {...bind('channels')} />}
      <RulePreview draft={draft} />
    </FormDialog>
  );
}

function Condition({ draft, bind }: Editing<Draft>) {
  const { kind, above, lasting, before } = draft;
  if (isExpiring(kind))
    return (
      <SelectField
        label="How long before the expiry"
        {...bind('before')}
        options={durations(warnings, before, '')}
      />
    );
  if (kind === 'schedule') return null;
  const unit = kind === 'load' ? '' : ', in %';
  return (
    <div class="fields">
      {kind === 'disk' && (
        <TextField label="Mount point, or * for the fullest file system" {...bind('mount')} placeholder="/" />
      )}
      {isMeasured(kind) && (
        <>
          <TextField label={`Above${unit}`} {...bind('above')} numeric required />
          <TextField
            label={`Resolve at${unit}`}
            {...bind('recover')}
            placeholder={String(Math.round(Number(above) * 90) / 100)}
            numeric
          />
        </>
      )}
      <SelectField
        label="Alert after the condition has lasted"
        {...bind('lasting')}
        options={durations(lastings, lasting, '0 s (at once)')}
      />
    </div>
  );
}

interface ChannelChoiceProps {
  value: readonly string[] | null;
  change: (channels: readonly string[] | null) => void;
}

/** The channels that get the alerts of a rule: all of them, or some. */
function ChannelChoice({ value: channels, change }: ChannelChoiceProps) {
  const { data } = useData(
    (signal) => client.alertChannels.list({ limit: 100, sort: 'name' }, { signal }),
    [],
    null,
  );
  if (data?.total === 0)
    return (
      <p class="hint">
        There is no channel yet, so alerts appear here only. <a href={to('/alerts/channels')}>Create one</a>{' '}
        to be notified.
      </p>
    );
  const all = data?.items.map(({ id }) => id) ?? [];
  return (
    <fieldset class="field">
      <legend>Send it to</legend>
      <CheckField
        label="All channels, also later ones"
        value={channels === null}
        change={(on) => change(on ? null : all)}
      />
      {channels !== null && data && (
        <CheckFields
          options={data.items.map(({ id, name, type }) => [id, `${name} (${type})`])}
          value={channels}
          change={change}
        />
      )}
    </fieldset>
  );
}

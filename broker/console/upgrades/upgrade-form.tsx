// The form that begins an upgrade of agents: which machines, which version, and in which waves.
import { useEffect } from 'preact/hooks';
import { client } from '../api-client.ts';
import { tagsOf } from '../machines/machine-restriction.tsx';
import { clearSelection, selected, toggle } from '../machines/selected-machines.ts';
import { TargetFields, type Targets } from '../machines/target-fields.tsx';
import { Form, SelectField, TextField } from '../parts/form.tsx';
import { type Editing, useDraft } from '../parts/form-draft-and-dialog.tsx';
import { Card } from '../parts/small-components.tsx';
import { useData } from '../parts/use-data.ts';
import { go, place, to } from '../router.ts';
import { minuteMs } from '../timers.ts';

const pauses = [
  ['0', 'none'],
  ['1', 'a minute'],
  ['5', '5 minutes'],
  ['30', '30 minutes'],
  ['60', 'an hour'],
  ['1440', 'a day'],
] as const;

interface Plan {
  /** The version to install. Empty means the version of the broker. */
  version: string;
  wave: string;
  /** Minutes between the end of a wave and the next wave. */
  pause: string;
  failures: string;
  running: 'wait' | 'end';
}

export function UpgradeForm() {
  const targets = useDraft<Targets>({ by: 'machines', tags: '' });
  const form = useDraft<Plan>({
    version: '',
    wave: '10%',
    pause: '1',
    failures: '0',
    running: 'wait',
  });
  const named = place.value.query.get('machine');
  useEffect(() => {
    if (named !== null && !selected.value.has(named)) toggle(named);
  }, [named]);
  const ids = [...selected.value];
  const { by, tags } = targets.draft;
  const wantedTags = tagsOf(tags);
  const isReady = by === 'tags' ? wantedTags.length > 0 : ids.length > 0;
  const { version, wave, pause, failures, running } = form.draft;
  return (
    <div class="narrow">
      <Form
        submit="Upgrade"
        disabled={!isReady || !/^\d+$/.test(failures)}
        run={async () => {
          const { id } = await client.upgrades.create({
            ...(by === 'tags' ? { tags: wantedTags } : { machine_ids: ids }),
            ...(version.trim() && { version: version.trim() }),
            wave: wave.trim(),
            pause: Number(pause) * minuteMs,
            max_failures: Number(failures),
            running,
          });
          clearSelection();
          go(to('/upgrades', id));
        }}
      >
        <TargetFields
          {...targets}
          hint="Every machine that has all of these tags when the upgrade is created"
        />
        <Card title="How">
          <PlanFields {...form} />
          {isReady && <Possible by={by} tags={wantedTags} />}
        </Card>
      </Form>
    </div>
  );
}

function PlanFields({ bind }: Editing<Plan>) {
  return (
    <div class="fields">
      <TextField
        label="Version"
        {...bind('version')}
        placeholder="the broker’s version"
        hint="May also be older than the version on the machines"
      />
      <TextField label="Machines per wave" {...bind('wave')} hint="A number, or a percentage" required />
      <SelectField label="Pause between waves" {...bind('pause')} options={pauses} />
      <TextField
        label="Allowed failures"
        {...bind('failures')}
        hint="The upgrade stops when more machines than this number have failed"
        numeric
        required
      />
      <SelectField
        label="If commands or terminals are running"
        {...bind('running')}
        options={[
          ['wait', 'wait for their end'],
          ['end', 'end them'],
        ]}
      />
    </div>
  );
}

/** Maximum number of machines that are checked before the upgrade begins. */
const mostRead = 100;

/**
 * Displays how many of the machines can be upgraded to the broker's version, and why the others cannot. Checks the first
 * `mostRead` machines by name.
 */
function Possible({ by, tags }: { by: Targets['by']; tags: readonly string[] }) {
  const names = tags.join(',');
  const ids = [...selected.value];
  const { data } = useData(
    (signal) =>
      client.machines.list(
        { limit: mostRead, sort: 'name', include: 'upgrade', ...(by === 'tags' && { tags: names }) },
        { signal },
      ),
    [by, names],
  );
  const found = data?.items.filter(({ id }) => by === 'tags' || ids.includes(id)) ?? [];
  const refused = found.filter(({ upgrade }) => upgrade?.possible === false);
  if (!data) return null;
  const unchecked = (by === 'tags' ? data.total : ids.length) - found.length;
  return (
    <div role="status">
      {found.length > 0 && (
        <p>
          {found.length - refused.length} of {found.length} can be upgraded to the version of the broker now.
        </p>
      )}
      {unchecked > 0 && (
        <p>Not checked: {unchecked.toLocaleString()}. The upgrade checks all machines when it begins.</p>
      )}
      {refused.length > 0 && (
        <ul class="hint">
          {refused.map(({ id, name, upgrade }) => (
            <li key={id}>
              {name}: {upgrade?.message ?? upgrade?.reason?.replaceAll('_', ' ')}
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

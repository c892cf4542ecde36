// A field for a cron expression. While the user types, it displays the expression in words and its next times.
import { useState } from 'preact/hooks';
import { client, messageOf } from '../api-client.ts';
import { TextField } from '../parts/form.tsx';
import { useTyped } from '../parts/use-data.ts';

type Preview = Awaited<ReturnType<typeof client.schedules.preview>>;

interface CronFieldProps {
  cron: string;
  timezone: string;
  change: (cron: string) => void;
}

export function CronField({ cron, timezone, change }: CronFieldProps) {
  const [preview, setPreview] = useState<Preview | string | undefined>(undefined);
  useTyped(
    [cron, timezone],
    (signal) => client.schedules.preview({ cron, timezone, count: 4 }, { signal }),
    setPreview,
    (error) => setPreview(messageOf(error)),
  );
  const format = new Intl.DateTimeFormat(undefined, {
    weekday: 'short',
    day: 'numeric',
    month: 'short',
    hour: '2-digit',
    minute: '2-digit',
    hour12: false,
    timeZone: timezone,
  });
  return (
    <div class="field">
      <TextField label="Cron expression" value={cron} change={change} mono required />
      <div class="cron-preview" aria-live="polite">
        {typeof preview === 'string' && <p class="bad-text">{preview}</p>}
        {typeof preview === 'object' && (
          <>
            <p>{preview.description}</p>
            <ol>
              {preview.next_runs.map((at) => (
                <li key={at}>{format.format(new Date(at))}</li>
              ))}
            </ol>
          </>
        )}
      </div>
    </div>
  );
}

// A list of events as sentences, newest first.

import { fullTime, timeOfDay } from '../format-times-and-sizes.ts';
import type { Happened } from '../live-updates.ts';
import { to } from '../router.ts';

const tones: readonly (readonly [pattern: RegExp, tone: string])[] = [
  [/failed|timeout|offline|disabled|fenced|removed|alert.(opened|repeated)/, 'bad'],
  [/completed|online|registered|connected$|resolved|upgraded/, 'good'],
];

const toneOf = (type: string): string => tones.find(([pattern]) => pattern.test(type))?.[1] ?? 'idle';

/** Fields that name the object of an event. If an event has several of them, the first in this list is displayed. */
const subjects = ['command', 'message', 'path', 'name', 'hostname', 'session_id'] as const;

function textOf({ type, data }: Happened): string {
  if (type === 'alert.notified') return notifiedText(data.alerts);
  const subject = subjects
    .map((name) => data[name])
    .find((value) => typeof value === 'string' && value !== '');
  const code = typeof data.exit_code === 'number' && data.exit_code !== 0 ? ` (exit ${data.exit_code})` : '';
  return `${typeof subject === 'string' ? subject : ''}${code}`;
}

/**
 * Returns the messages of the alerts in a notification, separated by `; `. Returns an empty text if `alerts` is not a
 * list of alerts.
 */
function notifiedText(alerts: unknown): string {
  const some: unknown[] = Array.isArray(alerts) ? alerts : [];
  const messages = some.map((alert) =>
    typeof alert === 'object' && alert !== null && 'message' in alert ? String(alert.message) : '',
  );
  return messages.filter((text) => text !== '').join('; ');
}

/** Returns the URL of the page about an event's command, machine or other object; undefined if there is no page. */
function linkOf({ type, data }: Happened): string | undefined {
  const idOf = (name: string): string | undefined =>
    typeof data[name] === 'string' ? data[name] : undefined;
  const [command, machine, session] = ['command_id', 'machine_id', 'session_id'].map(idOf);
  if (command !== undefined) return to('/commands', command);
  if (type.startsWith('alert.')) return to('/alerts');
  if (typeof data.upgrade_id === 'string') return to('/upgrades', data.upgrade_id);
  if (session !== undefined && machine !== undefined) return to('/machines', machine, 'terminals', session);
  return machine !== undefined && type !== 'machine.removed' ? to('/machines', machine) : undefined;
}

export function EventList({
  items,
  withMachine = false,
}: {
  items: readonly Happened[];
  withMachine?: boolean;
}) {
  return (
    <ol class="events card">
      {items.map((event) => {
        const link = linkOf(event);
        const text = textOf(event);
        const machine =
          withMachine && typeof event.data.machine_name === 'string' ? event.data.machine_name : '';
        return (
          <li key={event.id}>
            <time class="muted number" dateTime={event.timestamp} title={fullTime(event.timestamp)}>
              {timeOfDay(event.timestamp)}
            </time>
            <span class={`state ${toneOf(event.type)}`}>
              <i aria-hidden="true" />
              {link === undefined ? event.type : <a href={link}>{event.type}</a>}
            </span>
            <span class="cut muted">
              {machine && <strong>{machine}</strong>} {text}
            </span>
          </li>
        );
      })}
    </ol>
  );
}

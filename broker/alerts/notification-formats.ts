// Converts notifications to messages for people, in the format of each service such as Slack or ntfy.
import * as z from 'zod';
import type { ChannelType } from '../../shared/api/alert-channels.ts';

const notice = z.object({
  step: z.enum(['opened', 'repeated', 'resolved']),
  alert_id: z.string(),
  rule_id: z.string(),
  name: z.string(),
  machine_id: z.string().nullable(),
  message: z.string(),
});
/** One alert that was opened, repeated or resolved, as a notification lists it. */
export type Notice = z.output<typeof notice>;

/** The data of the event alert.notified, which is one notification of one channel. */
export const notification = z.object({
  channel_id: z.string(),
  /** Numbers of alerts that were opened, repeated and resolved, including alerts that are not listed. */
  counts: z.object({ opened: z.number(), repeated: z.number(), resolved: z.number() }),
  alerts: z.array(notice),
  /** Times in which the broker was down. */
  downtimes: z.array(z.object({ from: z.string(), until: z.string() })),
  /** Machines that were linked when the broker went down, and have not linked again since. */
  missing: z.array(z.object({ machine_id: z.string(), machine_name: z.string() })),
});
export type Notification = z.output<typeof notification>;

/** A message for people. */
export interface Message {
  title: string;
  lines: string[];
  /** True if the message is about a problem; false if it is only about the end of problems. */
  isUrgent: boolean;
}

const mostLines = 20;
const labels = { opened: 'Alert', repeated: 'Still', resolved: 'Resolved' } as const;

/**
 * Converts a notification to a message. If the notification is only about one alert, the title describes this alert.
 * Otherwise the title says how many alerts were opened, repeated and resolved, and whether the broker was down.
 */
export function messageOf({ counts, alerts, downtimes, missing }: Notification): Message {
  const total = counts.opened + counts.repeated + counts.resolved;
  const isUrgent = counts.opened + counts.repeated + downtimes.length > 0;
  const [only] = alerts;
  const line = ({ step, message }: Notice): string => `${labels[step]}: ${message}`;
  if (only && total === 1 && downtimes.length === 0)
    return { title: line(only), lines: [`Rule: ${only.name}`], isUrgent };
  const steps = (['opened', 'repeated', 'resolved'] as const).filter((step) => counts[step] > 0);
  const parts = steps.map((step) => `${counts[step].toLocaleString('en')} ${step}`);
  const down = downtimes.map(
    ({ from, until }) => `The broker was down from ${from} to ${until} and watched nothing during this time.`,
  );
  const title = [
    down.length > 0 ? 'The broker was down' : '',
    total > 0 ? `Alerts: ${parts.join(', ')}` : '',
  ];
  const away = missing.map(({ machine_name }) => machine_name).join(', ');
  const listed = alerts.slice(0, mostLines);
  return {
    title: title.filter(Boolean).join('. '),
    lines: [
      ...down,
      ...(away === '' ? [] : [`Machines that have not linked to the broker again: ${away}`]),
      ...listed.map(line),
      ...(total > listed.length ? [`and ${(total - listed.length).toLocaleString('en')} more`] : []),
    ],
    isUrgent,
  };
}

/** Maximum bytes of a text for Slack. Slack accepts 40,000 characters, but such a text is too long to read. */
const mostSlack = 3_000;
/**
 * Maximum bytes of a text for Discord, which refuses texts over 2,000 characters. A text never has more characters than
 * bytes.
 */
const mostDiscord = 2_000;
/** Maximum bytes of a text for ntfy, with a margin: ntfy refuses texts over 4,096 bytes. */
const mostNtfy = 3_500;

function cut(text: string, most: number): string {
  return Buffer.byteLength(text) <= most ? text : `${Buffer.from(text).toString('utf8', 0, most - 6)}…`;
}

/** Returns the JSON for a message, in the format that the service documents. `url` is the URL of the channel. */
export function jsonFor(
  type: Exclude<ChannelType, 'email' | 'webhook'>,
  url: string,
  message: Message,
): object {
  const { title, lines, isUrgent } = message;
  if (type === 'slack') {
    // Slack interprets <…> as links and mentions, so these characters are escaped.
    const safe = (text: string): string =>
      text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;');
    return { text: cut([`*${safe(title)}*`, ...lines.map(safe)].join('\n'), mostSlack) };
  }
  // allowed_mentions is empty, so that a machine named @everyone mentions no user.
  if (type === 'discord') {
    // Names of machines must not become links or other markup.
    const plain = (text: string): string => text.replaceAll(/[\\*_~`|>#()[\]]/g, '\\$&');
    return {
      content: cut([`**${plain(title)}**`, ...lines.map(plain)].join('\n'), mostDiscord),
      allowed_mentions: { parse: [] },
    };
  }
  return {
    topic: new URL(url).pathname.slice(1),
    title: cut(title, 250),
    message: cut(lines.join('\n'), mostNtfy),
    priority: isUrgent ? 4 : 3,
    tags: [isUrgent ? 'warning' : 'white_check_mark'],
  };
}

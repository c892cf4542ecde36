// An alert rule while it is edited, and how it is saved.
import { client } from '../api-client.ts';
import { fromLimited, toLimited } from '../machines/machine-restriction.tsx';
import { dayMs, minuteMs } from '../timers.ts';
import { isExpiring, isMeasured, type Rule } from './rule-texts.ts';

export type Draft = ReturnType<typeof draftOf>;

export function draftOf(rule: Rule | undefined) {
  const channels: readonly string[] | null = rule?.channel_ids ?? null;
  return {
    name: rule?.name ?? '',
    kind: rule?.kind ?? 'offline',
    above: String(rule?.above ?? 90),
    /** Value at which the alert ends. If the text is empty, 90 % of `above` is used. */
    recover: String(rule?.recover ?? ''),
    /** The mount point that a rule about disks watches, or "*". If the text is empty, "/" is used. */
    mount: rule?.mount ?? '',
    /** `lasting`, `before` and `repeat` are durations in milliseconds. */
    lasting: String(rule?.for ?? 5 * minuteMs),
    before: String(rule?.before ?? 14 * dayMs),
    repeat: String(rule?.repeat_every ?? 0),
    limits: fromLimited(rule),
    /** The channels that get the alerts. Null means all channels. */
    channels,
  };
}

/** Creates the rule, or changes the given one. Rejects with the broker's reason. */
export async function saveRule(draft: Draft, rule: Rule | undefined): Promise<void> {
  const { name, kind, above, recover, mount, lasting, before, repeat, limits, channels } = draft;
  // `recover` is sent only if the user changed it. Otherwise the broker computes the default from `above`. Exception:
  // it keeps the rule's present value if this is neither the default for the old `above` nor higher than the new one.
  const isNew = recover !== String(rule?.recover ?? '');
  const input = {
    name,
    repeat_every: Number(repeat) || null,
    channel_ids: channels && [...channels],
    ...(isMeasured(kind) && {
      above: Number(above),
      ...(isNew && { recover: recover === '' ? null : Number(recover) }),
    }),
    ...(kind === 'disk' && { mount: mount || null }),
    ...(isExpiring(kind) ? { before: Number(before) } : toLimited(limits)),
    ...(kind !== 'schedule' && !isExpiring(kind) && { for: Number(lasting) }),
  };
  if (rule) await client.alertRules.update({ rule_id: rule.id, ...input });
  else await client.alertRules.create({ kind, ...input });
}

// Alert rules in words: what each kind watches, and a sentence for one rule.
import type { client } from '../api-client.ts';
import { durationText } from '../format-times-and-sizes.ts';

export type Rule = Awaited<ReturnType<typeof client.alertRules.get>>;
type Kind = Rule['kind'];

/** The text after the label "Open an alert when" in the form, for each kind of rule. */
export const kinds: readonly (readonly [kind: Kind, text: string])[] = [
  ['offline', 'a machine is offline'],
  ['cpu', 'the CPU use of a machine is high'],
  ['memory', 'the memory use of a machine is high'],
  ['disk', 'a disk is nearly full'],
  ['load', 'the load of a machine is high'],
  ['schedule', 'a run of a schedule failed or did not start'],
  ['agent_outdated', 'an agent is older than the broker'],
  ['certificate', 'the certificate of the broker expires'],
  ['key', 'an API key expires'],
];

/** True for kinds that compare a value in the reports of machines with a threshold. */
export const isMeasured = (kind: Kind): boolean => ['cpu', 'memory', 'disk', 'load'].includes(kind);
/** True for kinds about expiry dates, which concern no machine. */
export const isExpiring = (kind: Kind): boolean => kind === 'certificate' || kind === 'key';
export const unitOf = (kind: Kind): string => (kind === 'load' ? '' : ' %');

const placeOf = (mount: string): string => (mount === '*' ? 'any disk' : `disk at ${mount}`);

/**
 * Returns the condition of a rule, such as `disk at / over 90 % for 5 min; resolves at 81 %`: an alert opens above 90 %
 * and resolves at 81 %.
 */
export function ruleText({ kind, above, recover, mount, for: lasting, before }: Rule): string {
  const [, text = kind] = kinds.find(([name]) => name === kind) ?? [];
  const during = lasting > 0 ? ` for ${durationText(lasting)}` : '';
  if (isExpiring(kind)) return `${text} within ${durationText(before ?? 0)}`;
  if (!isMeasured(kind)) return `${text}${during}`;
  const name = kind === 'cpu' ? 'CPU' : kind === 'disk' && mount !== null ? placeOf(mount) : kind;
  return `${name} over ${above}${unitOf(kind)}${during}; resolves at ${recover}${unitOf(kind)}`;
}

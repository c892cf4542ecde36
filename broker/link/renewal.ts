// When leaves are renewed: by wall time, for a box may sleep, and its clock may be set.
import type { SecureContextOptions } from 'node:tls';
import { every, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';

const day = 86_400_000;
/** A leaf is good for 90 days. */
const renewalMs = 30 * day;
/** It is good from a day before it was made; with a clock that was set back further nobody would take it. */
const backMs = day / 2;
const lookMs = 60_000;

/** Applies a newer leaf whenever the one made right now, or its successor, has had its time. The result stops that. */
export function renewLeaves(
  make: () => Promise<SecureContextOptions>,
  apply: (leaf: SecureContextOptions) => void,
  log: Logger,
): () => void {
  let made = now();
  const renew = async (): Promise<void> => {
    const at = now();
    apply(await make());
    made = at;
  };
  return every(lookMs, () => {
    const age = now() - made;
    if (age < renewalMs && age > -backMs) return;
    renew().catch((error: unknown) => log.error({ err: error }, 'a certificate could not be renewed'));
  });
}

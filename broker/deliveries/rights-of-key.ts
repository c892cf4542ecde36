// The interface by which deliveries ask for the rights of the key that a webhook or a channel of alerts
// belongs to.
import type { Scope } from '../../shared/api/route.ts';
import type { KeyId } from '../../shared/api/shared-schemas.ts';
import type { Declared } from '../state/in-memory-state.ts';

/** The rights of a key at this moment. */
export interface KeyRights {
  may(scope: Scope): boolean;
  reaches(machine: string): boolean;
  /** True if the other key may use all machines that this key may use. */
  within(other: KeyId): boolean;
}

/**
 * Returns the rights that a key has in the documents `declared`, by default in the committed ones. Returns undefined if
 * the key is revoked or expired.
 */
export type RightsOf = (id: KeyId, declared?: Declared) => KeyRights | undefined;

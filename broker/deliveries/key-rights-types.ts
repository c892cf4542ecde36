// Types for the rights of an API key. A delivery needs the rights of the key that owns its webhook or alert channel.
import type { Scope } from '../../shared/api/route.ts';
import type { KeyId } from '../../shared/api/shared-schemas.ts';
import type { Declared } from '../state/index.ts';

/** The rights of a key at this moment. */
export interface KeyRights {
  may(scope: Scope): boolean;
  reaches(machine: string): boolean;
  /** True if the other key may use all machines that this key may use. */
  within(other: KeyId): boolean;
}

/**
 * Returns the rights of a key according to the state `declared`, by default the committed state. Returns undefined if
 * the key is revoked or expired.
 */
export type RightsOf = (id: KeyId, declared?: Declared) => KeyRights | undefined;

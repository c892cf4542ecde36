// What a page displays in place of a part that the key may not use: which scope is missing.
import type { ComponentChildren } from 'preact';
import type { Scope } from '../../../shared/api/route.ts';
import { may } from '../login-state.ts';
import { key } from './icons.ts';
import { Empty } from './loading-failed-or-empty.tsx';

export function MissingScope({ scope }: { scope: Scope }) {
  return (
    <Empty icon={key} title="Your key does not allow this">
      <p>
        This needs the scope <code>{scope}</code>. Ask for a key that has it, then log in again.
      </p>
    </Empty>
  );
}

/** Draws `children` if the key has all of these scopes. Otherwise says which one is missing. */
export function WithScopes({ scopes, children }: { scopes: readonly Scope[]; children: ComponentChildren }) {
  const missing = scopes.find((scope) => !may(scope));
  return missing === undefined ? children : <MissingScope scope={missing} />;
}

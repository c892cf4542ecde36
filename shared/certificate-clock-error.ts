// Explains a refused certificate if the cause is this machine's wrong clock.
import { iso } from './clock.ts';

/**
 * Explains an OpenSSL error that a wrong clock can cause: a certificate has expired or is not yet valid. Returns
 * undefined for all other errors.
 */
export function clockFault(text: string): string | undefined {
  const [fault] = /not yet valid|has expired/i.exec(text) ?? [];
  const state = fault?.replace('not', 'is not');
  return state && `the broker’s certificate ${state} by the clock of this machine (${iso()}); set the clock`;
}

// Explains why a certificate is refused if the cause is the wrong clock of this machine.
import { iso } from './clock.ts';

/** The explanation for an error text of OpenSSL; undefined if the text does not point to the clock. */
export function clockFault(text: string): string | undefined {
  const [fault] = /not yet valid|has expired/i.exec(text) ?? [];
  const state = fault?.replace('not', 'is not');
  return state && `the broker’s certificate ${state} by the clock of this machine (${iso()}): set the clock`;
}

// Explains why a certificate is refused if the cause is the wrong clock of this machine.
import { iso } from './clock.ts';

/** The explanation for an error text of OpenSSL; undefined if the text does not point to the clock. */
export function clockFault(text: string): string | undefined {
  const [fault] = /not yet valid|has expired/i.exec(text) ?? [];
  return (
    fault &&
    `the broker’s certificate ${fault === 'has expired' ? fault : `is ${fault}`} by this machine’s clock, which says ${iso()}: set it`
  );
}

// A certificate that is refused because this machine's clock is wrong, in words.
import { iso } from './clock.ts';

/** Of an error text of OpenSSL; undefined where the clock is not the cause. */
export function clockFault(text: string): string | undefined {
  const [fault] = /not yet valid|has expired/i.exec(text) ?? [];
  return (
    fault &&
    `the broker’s certificate ${fault === 'has expired' ? fault : `is ${fault}`} by this machine’s clock, which says ${iso()}: set it`
  );
}

// What a broker says, fit for a log and for a terminal, whatever it is.
import { iso } from '../../shared/clock.ts';

const longest = 200;

export function said(text: string): string {
  return text.slice(0, longest).replace(/[\p{C}\u2028\u2029]/gu, '?');
}

/** In words, where a certificate was refused (as OpenSSL puts it) because this machine's clock is wrong. */
export function clockFault(text: string): string | undefined {
  const [fault] = /not yet valid|has expired/i.exec(text) ?? [];
  return (
    fault &&
    `the broker’s certificate ${fault === 'has expired' ? fault : `is ${fault}`} by this machine’s clock, which says ${iso()}: set it`
  );
}

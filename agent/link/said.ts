// What a broker says, fit for a log and for a terminal, whatever it is.
export { clockFault } from '../../shared/clock-fault.ts';

const longest = 200;

export function said(text: string): string {
  return text.slice(0, longest).replace(/[\p{C}\u2028\u2029]/gu, '?');
}

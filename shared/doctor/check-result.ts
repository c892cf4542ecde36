// The result of one check of a doctor command: its state, what was found, and how to fix a problem.
import { clean } from '../sanitize-text.ts';

export interface Finding {
  check: string;
  state: 'ok' | 'warn' | 'fail';
  what: string;
  mend?: string;
}

export const ok = (check: string, what: string): Finding => ({ check, state: 'ok', what });
const finding =
  (state: 'warn' | 'fail') =>
  (check: string, what: string, mend: string): Finding => ({ check, state, what, mend });
export const warn = finding('warn');
export const fail = finding('fail');

/** Returns the text after the list of findings: how to fix each finding that is not ok. */
export function mendText(findings: readonly Finding[]): string {
  const lines = findings.flatMap(({ check, mend }) => (mend === undefined ? [] : [`  ${check}: ${mend}`]));
  return ['', ...(lines.length === 0 ? ['No problem was found.'] : ['To fix:', ...lines])].join('\n');
}

/** Returns the findings and their fixes as text or JSON, and the exit code: 1 if a check failed. */
export function formatFindings(
  findings: readonly Finding[],
  output: 'text' | 'json',
): { text: string; code: number } {
  const code = findings.some(({ state }) => state === 'fail') ? 1 : 0;
  if (output === 'json') return { text: `${JSON.stringify(findings, undefined, 2)}\n`, code };
  const width = Math.max(...findings.map(({ check }) => check.length));
  const lines = findings.map(
    ({ state, check, what }) => `${state.padEnd(4)}  ${check.padEnd(width)}  ${clean(what)}`,
  );
  return { text: `${lines.join('\n')}\n${mendText(findings)}\n`, code };
}

export function reason(error: unknown): string {
  let last: unknown = error;
  while (last instanceof Error && last.cause !== undefined) last = last.cause;
  if (last instanceof AggregateError && last.errors.length > 0) return reason(last.errors[0]);
  return last instanceof Error ? last.message || String(last) : String(last);
}

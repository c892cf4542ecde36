// How a service is, for people and for programs.
import * as z from 'zod';
import { common } from '../settings.ts';
import type { Report } from './index.ts';

export const statusSettings = {
  output: {
    schema: z.enum(['text', 'json']).default('text'),
    value: 'FORM',
    short: 'o',
    help: 'text or json',
    flagOnly: true,
  },
  help: common.help,
};

/** `more`: what only this program can tell. */
export function reportText(
  name: string,
  found: Report,
  more: Record<string, unknown>,
  output: 'text' | 'json',
): string {
  const { installed, active, enabled, since, status, version, result, exitStatus, restarts, user, log } =
    found;
  const ended = { result, exit_status: exitStatus, restarts };
  const facts = { installed, active: active === 'active', state: active, enabled, since, user, status };
  if (output === 'json')
    return `${JSON.stringify({ ...facts, version: version ?? null, ...ended, ...more, log })}\n`;
  if (!installed) return `${name} is not installed as a service\n`;
  const failed = active === 'failed' ? `, ${result}: its exit code was ${exitStatus}` : '';
  return [
    `${version ? `${name} ${version}` : name}: ${active}${failed}, since ${since || 'ever'}, as ${user}${enabled ? '' : ', not started at boot'}`,
    ...(status && ['active', 'failed'].includes(active) ? [status] : []),
    ...(log.length > 0 ? ['', ...log] : []),
    '',
  ].join('\n');
}

// Every scope of a key, with a description of what it allows.
import type { Scope } from '../../../shared/api/route.ts';

/** The type makes the compiler report each scope that has no text here. */
export const scopeTexts: Readonly<Record<Scope, string>> = {
  'machines:read': 'See machines, their metrics, events and alerts',
  'machines:write': 'Rename, tag and remove machines, acknowledge alerts',
  'files:read': 'Read, download and search files',
  'files:write': 'Write, upload and delete files',
  'commands:read': 'See commands and their output',
  'commands:execute': 'Run and cancel commands',
  'sessions:read': 'See terminals',
  'sessions:attach': 'Open and use terminals',
  'schedules:read': 'See schedules and their runs',
  'schedules:write': 'Create and change schedules',
  'webhooks:read': 'See webhooks, alert channels, and what is delivered to them',
  'webhooks:write': 'Create and change webhooks, alert rules and channels',
  admin: 'Everything, including keys, join tokens and the audit log',
};
// The cast is safe: the record has exactly these keys.
export const allScopes = Object.keys(scopeTexts) as Scope[];

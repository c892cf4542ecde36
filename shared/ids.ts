// Ids and secrets: a prefix, then 0-9A-Za-z.
import { customAlphabet } from 'nanoid';

const alphabet = '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz';
const random = customAlphabet(alphabet, 22);
const randomSecret = customAlphabet(alphabet, 43);

/** What can have an id; the value is the prefix of spec section 2. */
export const prefixes = {
  machine: 'mach',
  command: 'cmd',
  batch: 'batch',
  session: 'sess',
  client: 'cli',
  schedule: 'sched',
  run: 'run',
  webhook: 'hook',
  delivery: 'dlv',
  event: 'evt',
  key: 'key',
  joinToken: 'join',
  link: 'link',
  call: 'call',
  request: 'req',
  audit: 'aud',
} as const;

export type IdKind = keyof typeof prefixes;

/** A new id of a kind, 131 bits of chance: `mach_…` with 22 characters. */
export function newId(kind: IdKind): string {
  return `${prefixes[kind]}_${random()}`;
}

/** Whether an id says that it is one of a kind. */
export function isId(kind: IdKind, id: string): boolean {
  return id.startsWith(`${prefixes[kind]}_`);
}

/** 256 bits of chance in 43 characters. */
export function newSecret(): string {
  return randomSecret();
}

// Generates ids and secrets of random characters 0-9A-Za-z; ids have a prefix.
import { customAlphabet } from 'nanoid';

const alphabet = '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz';
const random = customAlphabet(alphabet, 22);

/** Kinds of objects that have an id, each with the prefix of its ids. */
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
  alert: 'alert',
  alertRule: 'rule',
  channel: 'chan',
  window: 'win',
  upgrade: 'upg',
  savedCommand: 'saved',
  event: 'evt',
  key: 'key',
  login: 'login',
  joinToken: 'join',
  link: 'link',
  call: 'call',
  request: 'req',
  audit: 'aud',
} as const;

export type IdKind = keyof typeof prefixes;

/** Returns a new id of a kind, such as `mach_…`: the prefix and 22 characters with 131 random bits. */
export function newId(kind: IdKind): string {
  return `${prefixes[kind]}_${random()}`;
}

/** Number of characters that represent the time in an id of newTimedId(); 8 are enough for 6,900 years. */
const timeLength = 8;

/**
 * Returns a new id that begins with a time in milliseconds. In a table that is sorted by that time, a row can be found
 * by its id without an index of ids.
 */
export function newTimedId(kind: IdKind, ms: number): string {
  return `${prefixes[kind]}_${timePart(ms)}${random(22 - timeLength)}`;
}

/**
 * Returns an id in the form of newTimedId(), with characters from a hash instead of random ones. The same time and hash
 * yield the same id.
 */
export function timedId(kind: IdKind, ms: number, hash: Uint8Array): string {
  const rest = [...hash.subarray(0, 22 - timeLength)].map((byte) => alphabet[byte % alphabet.length]);
  return `${prefixes[kind]}_${timePart(ms)}${rest.join('')}`;
}

function timePart(ms: number): string {
  let time = '';
  for (let left = ms; time.length < timeLength; left = Math.floor(left / alphabet.length))
    time = alphabet.charAt(left % alphabet.length) + time;
  return time;
}

/** Returns the time at the beginning of an id of newTimedId(). The result for any other text has no meaning. */
export function timeOf(id: string): number {
  const begin = id.indexOf('_') + 1;
  const time = id.slice(begin, begin + timeLength).split('');
  return time.reduce((ms, character) => ms * alphabet.length + alphabet.indexOf(character), 0);
}

/** Returns the client's request id if it has 1 to 64 safe characters. Otherwise returns a new request id. */
export function requestIdFrom(given: string): string {
  return /^[A-Za-z0-9._-]{1,64}$/.test(given) ? given : newId('request');
}

export function isId(kind: IdKind, id: string): boolean {
  return id.startsWith(`${prefixes[kind]}_`);
}

/** Returns a new secret of 43 characters with 256 random bits. */
export const newSecret: () => string = customAlphabet(alphabet, 43);

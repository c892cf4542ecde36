// Encodes and decodes tar headers. Writes ustar headers with pax records, and also reads those of GNU tar and v7.
// Preserves names that are not UTF-8, unlike the package tar-stream.
import { type Bytes, bytes } from './byte-names.ts';

export const blockBytes = 512;

/** The kinds of entry that can be unpacked. kindOf() returns undefined for all others, such as devices. */
export type TarKind = 'file' | 'link' | 'symlink' | 'directory';

/**
 * The fields that are read from a header. The owner is not one of them, because files belong to the user who unpacks
 * them.
 */
export interface TarContent {
  kind: TarKind;
  name: Bytes;
  /** The path that a link or symlink points to. */
  target?: Bytes;
  mode: number;
  size: number;
  /** Nanoseconds since 1970. */
  mtimeNs: bigint;
}

export interface TarHeader extends TarContent {
  uid: number;
  gid: number;
  owner: string;
  group: string;
}

/** Number of padding bytes between the end of a body and the next header. */
export const paddingOf = (size: number): number => (blockBytes - (size % blockBytes)) % blockBytes;
/** The two blocks of zeros that end an archive. */
export const endOfArchive = Buffer.alloc(2 * blockBytes);

// ---- Encoding

const flags = { file: '0', link: '1', symlink: '2', directory: '5', pax: 'x' } as const;

/**
 * Returns the header blocks of an entry: first a pax header, then the plain header. The pax header contains the values
 * that do not fit into the plain header.
 */
export function encodeHeader(header: TarHeader): Buffer {
  const records = paxRecordsOf(header);
  const plain = encodeBlock(flags[header.kind], header);
  const size = records.length;
  const name = `PaxHeaders/${header.name.split('/').at(-1)?.slice(0, 80) ?? ''}`;
  const pax = encodeBlock(flags.pax, { ...header, name, target: '', mode: 0o644, size });
  return Buffer.concat([pax, records, Buffer.alloc(paddingOf(size)), plain]);
}

function paxRecordsOf({ name, target = '', size, uid, gid, mtimeNs }: TarHeader): Buffer {
  const records: [key: string, value: Bytes, fitsPlain: boolean][] = [
    ['path', name, name.length <= 100],
    ['linkpath', target, target.length <= 100],
    ['size', String(size), size < 8 ** 11],
    ['uid', String(uid), uid < 8 ** 7],
    ['gid', String(gid), gid < 8 ** 7],
    ['mtime', seconds(mtimeNs), false],
  ];
  return bytes(records.map(([key, value, fitsPlain]) => (fitsPlain ? '' : paxRecord(key, value))).join(''));
}

/** Returns a pax record, "LENGTH key=value\n". The length includes its own digits. */
function paxRecord(key: string, value: Bytes): Bytes {
  const rest = ` ${key}=${value}\n`;
  let length = rest.length;
  while (String(length).length + rest.length !== length) length = String(length).length + rest.length;
  return `${length}${rest}`;
}

function seconds(ns: bigint): string {
  const digits = String(ns < 0n ? -ns : ns).padStart(10, '0');
  return `${ns < 0n ? '-' : ''}${digits.slice(0, -9)}.${digits.slice(-9)}`;
}

function encodeBlock(flag: string, header: TarHeader): Buffer {
  const { name, target = '', mode, uid, gid, owner, group, size, mtimeNs } = header;
  const block = Buffer.alloc(blockBytes);
  const put = (text: Bytes, at: number, length: number) => block.write(text.slice(0, length), at, 'latin1');
  put(name, 0, 100);
  put(octal(mode & 0o7777, 7), 100, 8);
  put(octal(uid, 7), 108, 8);
  put(octal(gid, 7), 116, 8);
  put(octal(size, 11), 124, 12);
  put(octal(mtimeNs < 0n ? 0 : Number(mtimeNs / 1_000_000_000n), 11), 136, 12);
  put(flag, 156, 1);
  put(target, 157, 100);
  put('ustar\x0000', 257, 8);
  // Owner and group are cut to 31 bytes, so that a NUL ends each field of 32 bytes.
  put(Buffer.from(owner).toString('latin1'), 265, 31);
  put(Buffer.from(group).toString('latin1'), 297, 31);
  put(`${octal(checksumOf(block), 6)}\0 `, 148, 8);
  return block;
}

/**
 * Returns a value as exactly `digits` octal digits. For a value that is too large, returns the largest number that
 * fits. In this case encodeHeader() puts the true value into the pax header.
 */
function octal(value: number, digits: number): string {
  return Math.min(value, 8 ** digits - 1)
    .toString(8)
    .padStart(digits, '0');
}

/** Returns the sum of all bytes of a header. The bytes of the checksum field count as spaces. */
function checksumOf(block: Buffer): number {
  let sum = 8 * 0x20;
  for (let at = 0; at < blockBytes; at += 1) if (at < 148 || at >= 156) sum += block[at] ?? 0;
  return sum;
}

// ---- Decoding

/** One header block as it is, without the values of preceding pax and GNU headers. */
export interface TarBlock extends Omit<TarContent, 'kind'> {
  /** The type flag, such as "0" for a file. */
  flag: string;
  target: Bytes;
}

/** Decodes a header block; undefined if the block is no tar header. */
export function decodeBlock(block: Buffer): TarBlock | undefined {
  if (number(block, 148, 8) !== checksumOf(block)) return undefined;
  const name = text(block, 0, 100);
  // Only POSIX headers have a prefix of the name here. GNU stores times in these bytes, and v7 leaves them empty.
  const prefix = text(block, 257, 6) === 'ustar' && block[262] === 0 ? text(block, 345, 155) : '';
  const [size, mtime] = [number(block, 124, 12), number(block, 136, 12)];
  if (size === undefined || size < 0 || !Number.isSafeInteger(size)) return undefined;
  return {
    // Three flags mean a regular file: "0", an empty flag in the oldest tars (Unix v7), and "7", which asks for
    // contiguous storage. The last two are replaced by "0".
    flag: text(block, 156, 1).replace(/^7?$/, flags.file),
    name: prefix ? `${prefix}/${name}` : name,
    target: text(block, 157, 100),
    mode: (number(block, 100, 8) ?? 0) & 0o7777,
    size,
    mtimeNs: Number.isSafeInteger(mtime) ? BigInt(mtime ?? 0) * 1_000_000_000n : 0n,
  };
}

function text(block: Buffer, at: number, length: number): Bytes {
  const end = block.indexOf(0, at);
  return block.toString('latin1', at, end === -1 ? at + length : Math.min(end, at + length));
}

/**
 * Reads a number from a header field: binary if the first bit of the field is set (an extension of GNU tar), otherwise
 * octal digits. Returns undefined if the field contains anything else.
 */
function number(block: Buffer, at: number, length: number): number | undefined {
  if ((block[at] ?? 0) & 0x80)
    return Number(BigInt.asIntN(8 * length - 1, BigInt(`0x${block.toString('hex', at, at + length)}`)));
  const digits = text(block, at, length).trim();
  return /^[0-7]*$/.test(digits) ? Number.parseInt(`0${digits}`, 8) : undefined;
}

/** Returns the kind of entry for a type flag; undefined for kinds that cannot be unpacked. */
export const kindOf = (flag: string): TarKind | undefined =>
  (['file', 'link', 'symlink', 'directory'] as const).find((kind) => flags[kind] === flag);

/**
 * The key under which decodePax() stores each record whose key starts with "GNU.sparse.". Such a record marks a sparse
 * file.
 */
export const sparseRecord = 'GNU.sparse';
/** Keys of the records that are used. decodePax() drops all others, which could fill the memory. */
const usedRecords = new Set(['path', 'linkpath', 'size', 'mtime', sparseRecord]);

/**
 * Returns the records of a pax header by key, but only those with a key in `usedRecords`. Returns undefined if the
 * header is malformed.
 */
export function decodePax(body: Buffer): Map<string, Bytes> | undefined {
  const records = new Map<string, Bytes>();
  for (let at = 0; at < body.length; ) {
    const space = body.indexOf(0x20, at);
    const digits = space === -1 ? '' : body.toString('latin1', at, space);
    if (!/^[1-9]\d{0,8}$/.test(digits)) return undefined;
    const end = at + Number(digits);
    const cut = body.indexOf(0x3d, space);
    if (end > body.length || cut === -1 || cut >= end || body[end - 1] !== 0x0a) return undefined;
    const key = body.toString('latin1', space + 1, cut).replace(/^(GNU\.sparse)\..*$/s, '$1');
    if (usedRecords.has(key)) records.set(key, body.toString('latin1', cut + 1, end - 1));
    at = end;
  }
  return records;
}

/** Parses seconds such as "1700000000.25" to nanoseconds; undefined if the text has another form. */
export function nanoseconds(text: string): bigint | undefined {
  const match = /^(-?)(\d{1,15})(?:\.(\d*))?$/.exec(text);
  if (!match) return undefined;
  const [, sign, whole = '', fraction = ''] = match;
  const size = BigInt(whole) * 1_000_000_000n + BigInt(fraction.slice(0, 9).padEnd(9, '0'));
  return sign ? -size : size;
}

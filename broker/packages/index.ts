// The agent packages that this broker serves, and the line that installs one on a machine.
import { createHash } from 'node:crypto';
import { existsSync, readFileSync, statSync } from 'node:fs';
import { open, stat } from 'node:fs/promises';
import { join } from 'node:path';
import type { Handlers } from '../../shared/api/index.ts';
import { AppError, StartError } from '../../shared/errors.ts';
import { home, shipped } from '../../shared/install-layout.ts';
import { type Reached, scriptFor, type Words, wordsFor } from './install.ts';

export interface Packages {
  handlers: Handlers['packages'];
  /** SHA-256 of SHA256SUMS in hexadecimal, which join tokens carry; undefined where there are no packages. */
  hash(): string | undefined;
  /** The line that installs the agent with this token, under that name if one is given; or why there is none. */
  words(token: string, name?: string): Words;
}

const pieceBytes = 64 * 1024;
const sumsFile = 'SHA256SUMS';
const sumsLine = /^([0-9a-f]{64}) {2}([\w.-]+\.tar\.gz)$/;

/** Beside the programs of a package; in a checkout what `npm run package` made. */
const usual = (): string => shipped('packages', () => join(home, 'dist/packages'));

/** The files served, by name, with their SHA-256. */
interface Offer {
  directory: string;
  hash: string;
  files: ReadonlyMap<string, string>;
}

/** `directory`: as set by --packages. Throws StartError when that holds no packages. */
export function openPackages(directory: string | undefined, reached: () => Reached): Packages {
  const offered = offering(directory ?? usual(), directory !== undefined);
  return {
    handlers: {
      script() {
        assertOffer(offered());
        return { type: 'text/x-shellscript', body: scriptFor(reached()) };
      },
      async file({ file, if_none_match }, caller) {
        const { directory: folder, files } = assertOffer(offered());
        const hash = files.get(file);
        if (!hash)
          throw new AppError('route_not_found', `there is no such package; see ${sumsFile}`, { file });
        const etag = `"${hash}"`;
        caller.headers.set('ETag', etag);
        if (if_none_match?.includes(etag)) return { status: 304, filename: file };
        const path = join(folder, file);
        const { size } = await stat(path);
        return { filename: file, length: size, bytes: contentsOf(path) };
      },
    },
    hash: () => offered()?.hash,
    words: (token, name) =>
      offered() ? wordsFor(token, name, reached()) : { install: null, install_missing: missing },
  };
}

const missing =
  'this broker has no packages: make them with npm run package, or start it with --packages DIR';

function assertOffer(offer: Offer | undefined): Offer {
  if (offer) return offer;
  throw new AppError('route_not_found', missing);
}

/** Open for each piece alone: readers need no key, and slow ones would hold every file that the broker may open. */
async function* contentsOf(path: string): AsyncGenerator<Uint8Array> {
  for (let at = 0, piece = await pieceOf(path, at); piece.length > 0; piece = await pieceOf(path, at)) {
    at += piece.length;
    yield piece;
  }
}

async function pieceOf(path: string, at: number): Promise<Buffer> {
  const file = await open(path);
  try {
    const { buffer, bytesRead } = await file.read(Buffer.allocUnsafe(pieceBytes), 0, pieceBytes, at);
    return buffer.subarray(0, bytesRead);
  } finally {
    await file.close();
  }
}

/** The packages there now: read again when the list changes, as by `npm run package` beside a running broker. */
function offering(directory: string, isSet: boolean): () => Offer | undefined {
  let known = markOf(directory);
  let offer = offerIn(directory, isSet);
  return () => {
    const mark = markOf(directory);
    if (mark !== known) offer = soundOffer(directory);
    // A list with missing files may become complete without a change of its own.
    known = offer ? mark : '';
    return offer;
  };
}

/** Another list is another file, or one of another time; empty where there is none. */
function markOf(directory: string): string {
  const { ino, mtimeMs, size } = statSync(join(directory, sumsFile), { throwIfNoEntry: false }) ?? {};
  return ino === undefined ? '' : `${ino} ${mtimeMs} ${size}`;
}

/** A list that names missing files does not count: it is being written, or is damaged. */
function soundOffer(directory: string): Offer | undefined {
  try {
    return offerIn(directory, false);
  } catch (error) {
    if (error instanceof StartError) return undefined;
    throw error;
  }
}

function offerIn(directory: string, isSet: boolean): Offer | undefined {
  const path = join(directory, sumsFile);
  if (!existsSync(path)) {
    if (isSet) throw new StartError(`--packages ${directory}: there is no ${sumsFile} in it`);
    return undefined;
  }
  const text = readFileSync(path, 'utf8');
  const hash = createHash('sha256').update(text).digest('hex');
  const files = new Map([[sumsFile, hash]]);
  for (const line of text.trimEnd().split('\n')) {
    const [, sum, name] = sumsLine.exec(line) ?? [];
    if (!sum || !name || !existsSync(join(directory, name))) {
      throw new StartError(`${path}: "${line.slice(0, 200)}" does not name a package beside it`);
    }
    files.set(name, sum);
  }
  return { directory, hash, files };
}

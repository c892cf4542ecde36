// The agent packages that this broker serves, and the command line that installs an agent on a machine.
import { createHash } from 'node:crypto';
import { existsSync, readFileSync, statSync } from 'node:fs';
import { open, stat } from 'node:fs/promises';
import { join } from 'node:path';
import type { Handlers } from '../../shared/api/route-table.ts';
import { AppError, StartError } from '../../shared/errors.ts';
import { home, shipped } from '../../shared/install-layout.ts';
import { type Reached, scriptFor, type Words, wordsFor } from './install.ts';

export interface Packages {
  handlers: Handlers['packages'];
  /** SHA-256 of SHA256SUMS in hexadecimal, which join tokens include; undefined if there are no packages. */
  hash(): string | undefined;
  /**
   * The command line that installs an agent with this token and optional name,
   * or the reason why there is none.
   */
  words(token: string, name?: string): Words;
}

const pieceBytes = 64 * 1024;
const sumsFile = 'SHA256SUMS';
const sumsLine = /^([0-9a-f]{64}) {2}([\w.-]+\.tar\.gz)$/;

/**
 * The default directory: beside the installed programs; in a source checkout the output of `npm run package`.
 */
const usual = (): string => shipped('packages', () => join(home, 'dist/packages'));

/** The packages in a directory: file names with their SHA-256. */
interface Offer {
  directory: string;
  hash: string;
  files: ReadonlyMap<string, string>;
}

/**
 * Opens the packages in `directory`, the value of --packages.
 * Throws StartError if that is set and holds no packages.
 */
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

/**
 * Reads a file in pieces and opens it for each piece only. Downloads need no key, and slow ones could
 * otherwise hold every file descriptor of the broker.
 */
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

/**
 * Returns a function for the current packages.
 * It reads the list again after a change, as by `npm run package`.
 */
function offering(directory: string, isSet: boolean): () => Offer | undefined {
  let known = markOf(directory);
  let offer = offerIn(directory, isSet);
  return () => {
    const mark = markOf(directory);
    if (mark !== known) offer = soundOffer(directory);
    // While files are missing, the list is read again each time:
    // it may become complete without a change of its own.
    known = offer ? mark : '';
    return offer;
  };
}

/** Identifies a version of the list by its inode, time and size; empty if there is no list. */
function markOf(directory: string): string {
  const { ino, mtimeMs, size } = statSync(join(directory, sumsFile), { throwIfNoEntry: false }) ?? {};
  return ino === undefined ? '' : `${ino} ${mtimeMs} ${size}`;
}

/**
 * Reads the packages; undefined if the list names missing files,
 * because it is still being written or is damaged.
 */
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

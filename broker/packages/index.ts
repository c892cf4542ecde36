// The packages of agents that this broker hands out, and how a machine gets one with a single line.
import { createHash } from 'node:crypto';
import { existsSync, readFileSync, statSync } from 'node:fs';
import { open, stat } from 'node:fs/promises';
import { join } from 'node:path';
import type { Handlers } from '../../shared/api/index.ts';
import { AppError, StartError } from '../../shared/errors.ts';
import { home, shipped } from '../../shared/home.ts';
import { type Reached, scriptFor, type Words, wordsFor } from './install.ts';

export interface Packages {
  handlers: Handlers['packages'];
  /** SHA-256 of SHA256SUMS in hexadecimal, which join tokens carry; undefined where there are no packages. */
  hash(): string | undefined;
  /** The line that installs the agent with this token, under a name if one is told; or why there is none. */
  words(token: string, name?: string): Words;
}

const pieceBytes = 64 * 1024;
const sumsFile = 'SHA256SUMS';
const sumsLine = /^([0-9a-f]{64}) {2}([\w.-]+\.tar\.gz)$/;

/** Beside the programs of a package; in a checkout what `npm run package` made. */
const usual = (): string => shipped('packages', () => join(home, 'dist/packages'));

/** What can be had, by name, with its SHA-256. */
interface Offer {
  directory: string;
  hash: string;
  files: ReadonlyMap<string, string>;
}

/** `directory`: as told by the settings. Throws StartError when what is told is not there. */
export function openPackages(directory: string | undefined, reached: () => Reached): Packages {
  const offered = offering(directory ?? usual(), directory !== undefined);
  return {
    handlers: {
      script() {
        demand(offered());
        return { type: 'text/x-shellscript', body: scriptFor(reached()) };
      },
      async file({ file, if_none_match }, caller) {
        const { directory: folder, files } = demand(offered());
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

function demand(offer: Offer | undefined): Offer {
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

/** What lies there now: read again when its list changes, as `npm run package` beside a running broker does. */
function offering(directory: string, told: boolean): () => Offer | undefined {
  let known = markOf(directory);
  let offer = offerIn(directory, told);
  return () => {
    const mark = markOf(directory);
    if (mark !== known) offer = soundOffer(directory);
    // One that was not sound may become so as it is.
    known = offer ? mark : '';
    return offer;
  };
}

/** Another list is another file, or one of another time; empty where there is none. */
function markOf(directory: string): string {
  const { ino, mtimeMs, size } = statSync(join(directory, sumsFile), { throwIfNoEntry: false }) ?? {};
  return ino === undefined ? '' : `${ino} ${mtimeMs} ${size}`;
}

/** A list that names what is not there is none: somebody is at work on it, or has broken it. */
function soundOffer(directory: string): Offer | undefined {
  try {
    return offerIn(directory, false);
  } catch (error) {
    if (error instanceof StartError) return undefined;
    throw error;
  }
}

function offerIn(directory: string, told: boolean): Offer | undefined {
  const path = join(directory, sumsFile);
  if (!existsSync(path)) {
    if (told) throw new StartError(`--packages ${directory}: there is no ${sumsFile} in it`);
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

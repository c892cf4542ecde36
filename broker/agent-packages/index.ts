// Serves the agent packages, and creates the command line that installs an agent on a machine.
import { createHash } from 'node:crypto';
import { existsSync, readFileSync } from 'node:fs';
import { open, stat } from 'node:fs/promises';
import { join } from 'node:path';
import { packages as routes } from '../../shared/api/agent-packages.ts';
import type { Handlers } from '../../shared/api/route-table.ts';
import { AppError, StartError } from '../../shared/errors.ts';
import { home, shipped } from '../../shared/paths-in-checkout-or-package.ts';
import { pageOf } from '../list-pages-and-filters.ts';
import { type Catalog, packagesIn, toJson, uploadedPackages } from './available-packages.ts';
import { type Addresses, type InstallLine, installLineFor, scriptFor } from './install-line-and-script.ts';
import { uploadHandlers } from './upload-packages.ts';

export type { AgentPackage, Catalog } from './available-packages.ts';
export { removeUnfinishedUploads } from './upload-packages.ts';

export interface Packages {
  handlers: Handlers['packages'];
  /**
   * SHA-256 of the file SHA256SUMS, in hexadecimal; undefined if there are no packages. Join tokens contain this hash.
   */
  hash(): string | undefined;
  /** Reads the list of packages from the disk: the broker's own, signed or not, and the uploaded ones with a .sig. */
  catalog(): Catalog;
  /**
   * Returns the command line that installs an agent with this token and optional name, or the reason why there is none.
   */
  installLine(token: string, name?: string): InstallLine;
}

const pieceBytes = 64 * 1024;
const sumsFile = 'SHA256SUMS';
const sumsLine = /^([0-9a-f]{64}) {2}([\w.~+-]+\.(?:tar\.gz|deb)(?:\.sig)?)$/;

/**
 * The packages of a directory: `files` has the SHA-256 of each file by its name, and `hash` is the SHA-256 of
 * SHA256SUMS.
 */
interface Offer {
  hash: string;
  files: ReadonlyMap<string, string>;
}

/**
 * Finds the broker's own packages in `directory`, and the uploaded packages in `uploads`. `directory` is the value of
 * --packages. Throws StartError if it is set, but its SHA256SUMS is missing or has a wrong line.
 */
export function createPackages(
  directory: string | undefined,
  uploads: string,
  addresses: () => Addresses,
): Packages {
  // By default the packages are beside the installed programs or, in a checkout, in the output of npm run package.
  const folder = directory ?? shipped('packages', () => join(home, 'dist/packages'));
  // The list of packages is read at each use, because npm run package may replace it while the broker runs.
  const offered = (): Offer | undefined => completeOffer(folder);
  if (directory !== undefined && !offerIn(folder))
    throw new StartError(
      `--packages ${directory}: this directory has no ${sumsFile}; choose the output of npm run package`,
    );
  const catalog = (): Catalog => [
    ...packagesIn(folder, offered()?.files ?? []),
    ...uploadedPackages(uploads),
  ];
  return {
    handlers: {
      list: (input) => pageOf(routes.list, catalog().map(toJson), input),
      ...uploadHandlers(uploads, catalog),
      script() {
        assertOffer(offered());
        return { type: 'text/x-shellscript', body: scriptFor(addresses()) };
      },
      async file({ file, if_none_match }, caller) {
        const hash = assertOffer(offered()).files.get(file);
        if (!hash)
          throw new AppError(
            'route_not_found',
            `this broker has no package ${file}: choose one from ${sumsFile}`,
            { file },
          );
        const etag = `"${hash}"`;
        caller.headers.set('ETag', etag);
        if (if_none_match?.includes(etag)) return { status: 304, filename: file };
        const path = join(folder, file);
        const { size } = await stat(path);
        return { filename: file, length: size, bytes: contentsOf(path) };
      },
    },
    hash: () => offered()?.hash,
    catalog,
    installLine: (token, name) =>
      offered() ? installLineFor(token, name, addresses()) : { install: null, install_missing: missing },
  };
}

const missing =
  'this broker has no agent packages; build them with npm run package, or start the broker with --packages DIR';

function assertOffer(offer: Offer | undefined): Offer {
  if (offer) return offer;
  throw new AppError('route_not_found', missing);
}

/**
 * Yields a file in pieces. Opens the file for each piece, so that many slow downloads do not use up the file
 * descriptors.
 */
async function* contentsOf(path: string): AsyncGenerator<Uint8Array> {
  for (let at = 0, piece = await pieceOf(path, at); piece.length > 0; piece = await pieceOf(path, at)) {
    at += piece.length;
    yield piece;
  }
}

async function pieceOf(path: string, at: number): Promise<Buffer> {
  await using file = await open(path);
  const { buffer, bytesRead } = await file.read(Buffer.allocUnsafe(pieceBytes), 0, pieceBytes, at);
  return buffer.subarray(0, bytesRead);
}

/**
 * Like offerIn(), but returns undefined if SHA256SUMS has a wrong line. The file is then damaged, or is being written.
 */
function completeOffer(directory: string): Offer | undefined {
  try {
    return offerIn(directory);
  } catch (error) {
    if (error instanceof StartError) return undefined;
    throw error;
  }
}

/**
 * Reads the packages of a directory from its SHA256SUMS; undefined if there is no SHA256SUMS. Throws StartError if
 * SHA256SUMS has a wrong line: one that is not in the right format, or names a missing file.
 */
function offerIn(directory: string): Offer | undefined {
  const path = join(directory, sumsFile);
  if (!existsSync(path)) return undefined;
  const text = readFileSync(path, 'utf8');
  const hash = createHash('sha256').update(text).digest('hex');
  const files = new Map([[sumsFile, hash]]);
  for (const line of text.trimEnd().split('\n')) {
    const [, sum, name] = sumsLine.exec(line) ?? [];
    if (!sum || !name || !existsSync(join(directory, name))) {
      throw new StartError(
        `${path}: the line "${line.slice(0, 200)}" names no package in this directory; build the packages again`,
      );
    }
    files.set(name, sum);
  }
  return { hash, files };
}

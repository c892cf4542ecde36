// Uploads in the background: a queue of files with their progress. It continues while other pages are open.
import { signal } from '@preact/signals';
import { failureOf } from '../../../shared/sdk/error.ts';
import { consoleHeader, messageOf } from '../api-client.ts';
import { after } from '../time.ts';
import { joined } from './paths.ts';

export interface Upload {
  id: number;
  machine: string;
  path: string;
  file: File;
  state: 'waiting' | 'sending' | 'done' | 'failed' | 'cancelled';
  /** Bytes sent so far. */
  sent: number;
  /** True if the upload may replace a file. */
  replace: boolean;
  error?: string;
  /** True if the upload failed because the file exists. */
  exists?: boolean;
}

export const uploads = signal<readonly Upload[]>([]);
/** A counter that changes when uploads have ended. Open folders then load their list again. */
export const arrivals = signal(0);

/**
 * Maximum number of uploads at the same time. A browser has six connections: live updates need one, and one must
 * be free for the pages.
 */
const atOnce = 4;
/** Milliseconds between two loads of the list while many small files arrive. */
const betweenListings = 2_000;
const running = new Map<number, XMLHttpRequest>();
let lastId = 0;

/** A file with its path relative to a folder. */
export interface Chosen {
  path: string;
  file: File;
}

/** Adds files to the queue. `replace`: true if a file may replace an existing one. */
export function upload(
  machine: string,
  folder: string,
  files: readonly Chosen[],
  replace: (file: Chosen) => boolean,
): void {
  const added = files.map((chosen): Upload => {
    lastId += 1;
    const { path, file } = chosen;
    const to = { machine, path: joined(folder, path), replace: replace(chosen) };
    return { id: lastId, ...to, file, state: 'waiting', sent: 0 };
  });
  const isOver = ({ state }: Upload): boolean => state === 'done' || state === 'cancelled';
  const before = uploads.value.every(isOver) ? [] : uploads.value;
  uploads.value = [...before, ...added];
  next();
}

export function cancelUploads(): void {
  uploads.value = uploads.value.map((one) =>
    one.state === 'waiting' ? { ...one, state: 'cancelled' } : one,
  );
  for (const request of [...running.values()]) request.abort();
}

/** Sends all failed uploads again. If an upload failed because the file exists, the file is replaced this time. */
export function retryFailed(): void {
  uploads.value = uploads.value.map((one) => {
    const { error: _, exists = false, ...again } = one;
    return one.state === 'failed'
      ? { ...again, state: 'waiting', sent: 0, replace: one.replace || exists }
      : one;
  });
  next();
}

export function dismissUploads(): void {
  uploads.value = [];
}

function change(id: number, changes: Partial<Upload>): void {
  uploads.value = uploads.value.map((one) => (one.id === id ? { ...one, ...changes } : one));
}

function next(): void {
  while (running.size < atOnce) {
    const waiting = uploads.value.find(({ state }) => state === 'waiting');
    if (!waiting) return;
    send(waiting);
  }
}

let cancelListing: (() => void) | undefined;

/** Makes open folders load their list again: at once after the last upload, otherwise at intervals. */
function listAgain(): void {
  if (running.size === 0) cancelListing?.();
  else if (cancelListing) return;
  cancelListing = after(running.size === 0 ? 0 : betweenListings, () => {
    cancelListing = undefined;
    arrivals.value += 1;
  });
}

/** Sends a file. XMLHttpRequest is used because only it reports the progress of a body. */
function send({ id, machine, path, file, replace }: Upload): void {
  const request = new XMLHttpRequest();
  running.set(id, request);
  change(id, { state: 'sending' });
  const query = new URLSearchParams({ path, create_parents: 'true', overwrite: String(replace) });
  request.open('PUT', `/api/v1/machines/${encodeURIComponent(machine)}/files/raw?${query}`);
  request.setRequestHeader(...consoleHeader);
  request.upload.addEventListener('progress', ({ loaded }) => change(id, { sent: loaded }));
  const end = (changes: Partial<Upload>): void => {
    running.delete(id);
    change(id, changes);
    next();
    listAgain();
  };
  request.addEventListener('load', () => {
    if (request.status < 300) end({ state: 'done', sent: file.size });
    else {
      const failure = failureOf(responseOf(request), request.responseText);
      end({ state: 'failed', error: messageOf(failure), exists: failure.code === 'already_exists' });
    }
  });
  request.addEventListener('error', () =>
    end({ state: 'failed', error: 'the connection broke, or the file changed or cannot be read' }),
  );
  request.addEventListener('abort', () => end({ state: 'cancelled' }));
  request.send(file);
}

const responseOf = ({ status }: XMLHttpRequest): Response => new Response(null, { status });

// Chromium has no global classes for entries, so their type is found by their fields.
const isFile = (entry: FileSystemEntry): entry is FileSystemFileEntry => entry.isFile;
const isFolder = (entry: FileSystemEntry): entry is FileSystemDirectoryEntry => entry.isDirectory;

/** Returns the dropped files. A file in a dropped folder has its path inside that folder. */
export async function droppedFiles(items: DataTransferItemList): Promise<Chosen[]> {
  // The entries must be read before the first await, because the list is empty afterwards.
  const entries = [...items].flatMap((item) => item.webkitGetAsEntry() ?? []);
  const found: Chosen[] = [];
  const walk = async (entry: FileSystemEntry): Promise<void> => {
    if (isFile(entry)) {
      const file = await new Promise<File>((resolve, reject) => entry.file(resolve, reject));
      found.push({ path: entry.fullPath.slice(1), file });
    } else if (isFolder(entry)) for (const child of await childrenOf(entry)) await walk(child);
  };
  for (const entry of entries) await walk(entry);
  return found;
}

async function childrenOf(folder: FileSystemDirectoryEntry): Promise<FileSystemEntry[]> {
  const reader = folder.createReader();
  const all: FileSystemEntry[] = [];
  // Each call returns some of the entries. The last call returns none.
  for (;;) {
    const some = await new Promise<FileSystemEntry[]>((resolve, reject) =>
      reader.readEntries(resolve, reject),
    );
    if (some.length === 0) return all;
    all.push(...some);
  }
}

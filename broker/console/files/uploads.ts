// Uploads in the background: a queue of files with their progress. The uploads continue while other pages are open.
import { signal } from '@preact/signals';
import { failureOf } from '../../../shared/sdk/errors-and-envelopes.ts';
import { consoleHeader, messageOf } from '../api-client.ts';
import { say } from '../parts/toasts.tsx';
import { soon } from '../timers.ts';
import { joined } from './paths.ts';

export interface Upload {
  machine: string;
  path: string;
  file: File;
  state: 'waiting' | 'sending' | 'done' | 'failed';
  /** Bytes sent so far. */
  sent: number;
  /** True if the upload may replace a file. */
  replace: boolean;
  error?: string;
  /** True if the upload failed because the file exists. */
  exists?: boolean;
}

/**
 * All uploads, oldest first. Each upload is changed in place, and the array is replaced soon after, for the pages to
 * display. Otherwise each of thousands of progress reports would copy the array.
 */
export const uploads = signal<readonly Upload[]>([]);
/**
 * A counter that grows when the last running upload has ended. An open folder then loads its list again at once. While
 * uploads run, the folder loads its list only when the broker reports file events.
 */
export const arrivals = signal(0);

/**
 * Maximum number of uploads at the same time. A browser opens at most six connections to the broker. One is for live
 * updates, and one must be free for other requests.
 */
const atOnce = 4;
/** Milliseconds from a change until pages display it. They display all changes made in this time together. */
const showMs = 30;
const running = new Set<XMLHttpRequest>();

/** A file to upload, with its path relative to the target folder. */
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
    const { path, file } = chosen;
    const to = { machine, path: joined(folder, path), replace: replace(chosen) };
    return { ...to, file, state: 'waiting', sent: 0 };
  });
  const before = uploads.value;
  uploads.value = [...(before.every(({ state }) => state === 'done') ? [] : before), ...added];
  next();
}

export function cancelUploads(): void {
  uploads.value = uploads.value.filter(({ state }) => state === 'done' || state === 'failed');
  for (const request of [...running]) request.abort();
  say('Uploads cancelled');
}

/** Sends all failed uploads again. If an upload failed because the file exists, the file is replaced this time. */
export function retryFailed(): void {
  for (const one of uploads.value) {
    if (one.state !== 'failed') continue;
    one.replace ||= one.exists ?? false;
    Object.assign(one, { state: 'waiting', sent: 0 });
    delete one.error;
    delete one.exists;
  }
  next();
}

export function dismissUploads(): void {
  uploads.value = [];
}

const show = soon(showMs, () => {
  uploads.value = [...uploads.value];
});

function change(upload: Upload, changes: Partial<Upload>): void {
  Object.assign(upload, changes);
  show();
}

function next(): void {
  while (running.size < atOnce) {
    const waiting = uploads.value.find(({ state }) => state === 'waiting');
    if (!waiting) break;
    send(waiting);
  }
  show();
}

/** Sends a file with XMLHttpRequest, because fetch() does not report the progress of an upload. */
function send(upload: Upload): void {
  const { machine, path, file, replace } = upload;
  const request = new XMLHttpRequest();
  running.add(request);
  change(upload, { state: 'sending' });
  const query = new URLSearchParams({ path, create_parents: 'true', overwrite: String(replace) });
  request.open('PUT', `/api/v1/machines/${encodeURIComponent(machine)}/files/raw?${query}`);
  request.setRequestHeader(...consoleHeader);
  request.upload.addEventListener('progress', ({ loaded }) => change(upload, { sent: loaded }));
  const end = (changes: Partial<Upload>): void => {
    running.delete(request);
    change(upload, changes);
    next();
    if (running.size === 0) arrivals.value += 1;
  };
  request.addEventListener('load', () => {
    if (request.status < 300) end({ state: 'done', sent: file.size });
    else {
      const failure = failureOf(new Response(null, { status: request.status }), request.responseText);
      end({ state: 'failed', error: messageOf(failure), exists: failure.code === 'already_exists' });
    }
  });
  request.addEventListener('error', () =>
    end({ state: 'failed', error: 'the connection broke, or the file changed or cannot be read' }),
  );
  request.addEventListener('abort', () => end({}));
  request.send(file);
}

// Chromium has no global classes for these entries, so instanceof cannot distinguish files from folders.
const isFile = (entry: FileSystemEntry): entry is FileSystemFileEntry => entry.isFile;
const isFolder = (entry: FileSystemEntry): entry is FileSystemDirectoryEntry => entry.isDirectory;

/** Returns the dropped files. The path of a file in a dropped folder begins with the name of that folder. */
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

// Uploads in the background: a queue of files, with their progress, which goes on while other pages are open.
import { signal } from '@preact/signals';
import { failureOf } from '../../../shared/sdk/error.ts';
import { consoleHeader, messageOf } from '../client.ts';
import { joined } from './paths.ts';

export interface Upload {
  id: number;
  machine: string;
  path: string;
  file: File;
  state: 'waiting' | 'sending' | 'done' | 'failed' | 'cancelled';
  /** Bytes that were sent. */
  sent: number;
  error?: string;
}

export const uploads = signal<readonly Upload[]>([]);
/** Changes whenever uploads end, so that open folders are listed again. */
export const arrivals = signal(0);

const atOnce = 2;
const running = new Map<number, XMLHttpRequest>();
let lastId = 0;

/** Adds files to the queue; `path` of each is relative to the folder. */
export function upload(
  machine: string,
  folder: string,
  files: readonly { path: string; file: File }[],
): void {
  const added = files.map(({ path, file }): Upload => {
    lastId += 1;
    return { id: lastId, machine, path: joined(folder, path), file, state: 'waiting', sent: 0 };
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

export function retryFailed(): void {
  uploads.value = uploads.value.map(({ error: _, ...one }) =>
    one.state === 'failed' ? { ...one, state: 'waiting', sent: 0 } : one,
  );
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

/** Sends a file; only XMLHttpRequest reports how much of a body was sent. */
function send({ id, machine, path, file }: Upload): void {
  const request = new XMLHttpRequest();
  running.set(id, request);
  change(id, { state: 'sending' });
  const query = new URLSearchParams({ path, create_parents: 'true' });
  request.open('PUT', `/api/v1/machines/${encodeURIComponent(machine)}/files/raw?${query}`);
  request.setRequestHeader(...consoleHeader);
  request.upload.addEventListener('progress', ({ loaded }) => change(id, { sent: loaded }));
  const end = (changes: Partial<Upload>): void => {
    running.delete(id);
    change(id, changes);
    arrivals.value += 1;
    next();
  };
  request.addEventListener('load', () => {
    if (request.status < 300) end({ state: 'done', sent: file.size });
    else end({ state: 'failed', error: messageOf(failureOf(responseOf(request), request.responseText)) });
  });
  request.addEventListener('error', () =>
    end({ state: 'failed', error: 'the connection broke, or the file changed or cannot be read' }),
  );
  request.addEventListener('abort', () => end({ state: 'cancelled' }));
  request.send(file);
}

const responseOf = ({ status }: XMLHttpRequest): Response => new Response(null, { status });

// Chromium has no global classes for entries, so their fields say what they are.
const isFile = (entry: FileSystemEntry): entry is FileSystemFileEntry => entry.isFile;
const isFolder = (entry: FileSystemEntry): entry is FileSystemDirectoryEntry => entry.isDirectory;

/** The files of a drop, those in folders with their path inside of it. */
export async function droppedFiles(items: DataTransferItemList): Promise<{ path: string; file: File }[]> {
  // The entries must be taken before the first await: afterwards the list is empty.
  const entries = [...items].flatMap((item) => item.webkitGetAsEntry() ?? []);
  const found: { path: string; file: File }[] = [];
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
  // Each call answers some of the entries, the last none.
  for (;;) {
    const some = await new Promise<FileSystemEntry[]>((resolve, reject) =>
      reader.readEntries(resolve, reject),
    );
    if (some.length === 0) return all;
    all.push(...some);
  }
}

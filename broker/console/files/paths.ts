// Paths on machines: their parts, and names that are not UTF-8, which are sent as base64.
import type { client } from '../api-client.ts';
import { setQuery } from '../router.ts';

export type Listing = Awaited<ReturnType<typeof client.files.list>>;
export type FileEntry = Listing['files'][number];

/** Opens a file in the editor, or opens a folder. Opening a folder removes a search from the URL. */
export const goToPath = (place: { path: string } | { edit: string }): void =>
  setQuery({ ...('path' in place && { find: '', in: '' }), ...place }, { push: true });

export const isFolder = ({ type }: FileEntry): boolean => type === 'directory';

/** True for a folder itself, but not for a link to a folder. Deleting a folder deletes its content too. */
export const hasContent = (entry: FileEntry): boolean => isFolder(entry) && entry.link_target === undefined;

/** Returns the path of an entry for requests. */
export const pathOf = ({ path, name_encoding }: FileEntry) => ({
  path,
  ...(name_encoding !== undefined && { path_encoding: name_encoding }),
});

/** Returns the path that an entry gets in a folder, as requests to copy and move contain it. */
export function destinationIn(folder: string, { name, name_encoding }: FileEntry) {
  if (name_encoding === undefined) return { destination: joined(folder, name) };
  const before = String.fromCharCode(...new TextEncoder().encode(joined(folder, '')));
  return { destination: btoa(before + atob(name)), destination_encoding: name_encoding };
}

/** Returns a name as text. Bytes that are not UTF-8 become replacement characters. */
export function nameToRead({ name, name_encoding }: Pick<FileEntry, 'name' | 'name_encoding'>): string {
  if (name_encoding === undefined) return name;
  return new TextDecoder().decode(Uint8Array.from(atob(name), (letter) => letter.charCodeAt(0)));
}

export const joined = (folder: string, name: string): string => `${folder.replace(/\/$/, '')}/${name}`;
export const parentOf = (path: string): string => path.replace(/\/[^/]*\/?$/, '') || '/';
export const baseOf = (path: string): string => path.replace(/.*\//, '');

/** Returns the folders from the root to the path itself, each with its name and its own path. */
export function crumbsOf(path: string): { name: string; path: string }[] {
  const names = path.split('/').filter(Boolean);
  const crumbs = names.map((name, index) => ({ name, path: `/${names.slice(0, index + 1).join('/')}` }));
  return [{ name: '/', path: '/' }, ...crumbs];
}

/** Returns the URL of a download. The browser writes the file to disk while it arrives. */
export function downloadAddress(machine: string, entry: FileEntry): string {
  const query = new URLSearchParams({
    ...pathOf(entry),
    ...(isFolder(entry) && { archive: 'tar.gz' }),
  });
  return `/api/v1/machines/${encodeURIComponent(machine)}/files/download?${query}`;
}

/** Maximum size in bytes of a file that the editor opens. */
const mostToEdit = 2 * 1024 * 1024;

export const isEditable = ({ type, size = 0, special, name_encoding }: FileEntry): boolean =>
  type === 'file' && special === undefined && size <= mostToEdit && name_encoding === undefined;

// What `farhand login` keeps: the broker, the key and how the broker is known; readable by its owner alone.
import { mkdirSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { homedir } from 'node:os';
import { dirname, join } from 'node:path';
import { StartError } from '../../shared/errors.ts';
import { atPath, reasonOf } from '../../shared/system-errors.ts';

export interface Saved {
  url: string;
  api_key: string;
  pin?: string;
  ca?: string;
  insecure?: boolean;
}

export function savedAt(): string {
  return join(process.env.XDG_CONFIG_HOME || join(homedir(), '.config'), 'farhand', 'config.json');
}

export function readSaved(): Saved | undefined {
  const file = savedAt();
  let text: string;
  try {
    text = readFileSync(file, 'utf8');
  } catch (error) {
    if (error instanceof Error && 'code' in error && ['ENOENT', 'ENOTDIR'].includes(String(error.code)))
      return;
    throw new StartError(reasonOf(atPath(error, file)));
  }
  const saved = parse(text);
  if (saved) return saved;
  throw new StartError(`${file} is damaged: farhand login writes a new one`);
}

function parse(text: string): Saved | undefined {
  try {
    const value: unknown = JSON.parse(text);
    return isSaved(value) ? value : undefined;
  } catch {
    return undefined;
  }
}

/** Our own file: that it is one of ours is enough. */
function isSaved(value: unknown): value is Saved {
  if (typeof value !== 'object' || value === null || !('url' in value) || !('api_key' in value)) return false;
  return typeof value.url === 'string' && typeof value.api_key === 'string';
}

/** Whole or not at all, and never for others to read. */
export function writeSaved(saved: Saved): void {
  const file = savedAt();
  mkdirSync(dirname(file), { recursive: true, mode: 0o700 });
  const draft = `${file}.${process.pid}`;
  try {
    writeFileSync(draft, `${JSON.stringify(saved, null, 2)}\n`, { mode: 0o600, flag: 'wx', flush: true });
    renameSync(draft, file);
  } finally {
    rmSync(draft, { force: true });
  }
}

export function forgetSaved(): boolean {
  const there = readSavedQuietly();
  rmSync(savedAt(), { force: true });
  return there;
}

function readSavedQuietly(): boolean {
  try {
    return readSaved() !== undefined;
  } catch {
    return true;
  }
}

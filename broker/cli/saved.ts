// What `farhand login` keeps: the broker, the key and how the broker is known; readable by its owner alone.
import { existsSync, readFileSync, rmSync } from 'node:fs';
import { mkdir } from 'node:fs/promises';
import { homedir } from 'node:os';
import { dirname, join } from 'node:path';
import { writeDurably } from '../../shared/durable-file.ts';
import { errnoOf, StartError } from '../../shared/errors.ts';
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
  try {
    const saved: unknown = JSON.parse(readFileSync(file, 'utf8'));
    if (isSaved(saved)) return saved;
  } catch (error) {
    const code = errnoOf(error);
    if (code === 'ENOENT' || code === 'ENOTDIR') return undefined;
    if (code) throw new StartError(reasonOf(atPath(error, file)));
  }
  throw new StartError(`${file} is damaged: farhand login writes a new one`);
}

/** Our own file: that it is one of ours is enough. */
function isSaved(value: unknown): value is Saved {
  if (typeof value !== 'object' || value === null || !('url' in value) || !('api_key' in value)) return false;
  return typeof value.url === 'string' && typeof value.api_key === 'string';
}

/** Whole or not at all, and never for others to read. */
export async function writeSaved(saved: Saved): Promise<void> {
  await mkdir(dirname(savedAt()), { recursive: true, mode: 0o700 });
  await writeDurably(savedAt(), `${JSON.stringify(saved, null, 2)}\n`);
}

/** Whether there was something to forget. */
export function forgetSaved(): boolean {
  const there = existsSync(savedAt());
  rmSync(savedAt(), { force: true });
  return there;
}

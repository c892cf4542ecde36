// What all packaging steps share: the root and the version of the checkout, and functions that run programs and read
// JSON.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { execa } from 'execa';
import { z } from 'zod';

export { version } from '../../shared/version.ts';
export const root = join(import.meta.dirname, '../..');

/** Architectures of the packages, as Node names them. */
export const arches = ['x64', 'arm64'] as const;
export type Arch = (typeof arches)[number];

/** Runs a program to its end, and returns its stdout. Throws if the program fails. */
export async function run(file: string, args: string[], cwd: string = root): Promise<string> {
  const { stdout } = await execa(file, args, { cwd });
  return stdout;
}

export function readJson<T extends z.ZodType>(file: string, schema: T): z.output<T> {
  return schema.parse(JSON.parse(readFileSync(file, 'utf8')));
}

/** Schema of the fields of package.json that are copied into packages. */
export const manifestSchema = z.object({
  name: z.string(),
  version: z.string(),
  description: z.string().optional(),
  license: z.string(),
  engines: z.record(z.string(), z.string()).optional(),
  optionalDependencies: z.record(z.string(), z.string()).default({}),
});

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

/** Error of a program that failed. Its message is the command and the last lines of its standard error. */
export class StepFailed extends Error {}

const lastLines = 20;

/** Runs a program to its end, and returns its stdout. Throws StepFailed if the program fails. */
export async function run(file: string, args: string[], cwd: string = root): Promise<string> {
  const { failed, stdout, stderr, shortMessage } = await execa(file, args, { cwd, reject: false });
  if (!failed) return stdout;
  const lines = stderr.split('\n').slice(-lastLines);
  throw new StepFailed([shortMessage, ...lines].join('\n').trimEnd());
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

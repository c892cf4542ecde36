// The REST handlers of all file routes; the agent of the machine does the work.
import type { Handlers } from '../../shared/api/index.ts';
import type { FileServices } from './calls.ts';
import { downloadHandlers } from './download.ts';
import { readHandlers } from './read.ts';
import { writeHandlers } from './write.ts';

export { contentBytes } from './read.ts';

export function fileHandlers(services: FileServices): Handlers['files'] {
  return { ...readHandlers(services), ...writeHandlers(services), ...downloadHandlers(services) };
}

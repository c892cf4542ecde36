// The REST handlers of all file routes; the agent of the machine does the work.
import type { Handlers } from '../../shared/api/route-table.ts';
import type { FileServices } from './agent-calls.ts';
import { downloadHandlers } from './download.ts';
import { readHandlers } from './read-handlers.ts';
import { writeHandlers } from './write-handlers.ts';

export { contentBytes } from './read-handlers.ts';

export function fileHandlers(services: FileServices): Handlers['files'] {
  return { ...readHandlers(services), ...writeHandlers(services), ...downloadHandlers(services) };
}

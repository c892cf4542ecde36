// Files on machines: between REST and the machine's stub. Bytes are passed on as they come.
import type { Handlers } from '../../shared/api/index.ts';
import type { FileRooms } from './calls.ts';
import { downloadHandlers } from './download.ts';
import { readHandlers } from './read.ts';
import { writeHandlers } from './write.ts';

export { contentBytes } from './read.ts';

export function fileHandlers(rooms: FileRooms): Handlers['files'] {
  return { ...readHandlers(rooms), ...writeHandlers(rooms), ...downloadHandlers(rooms) };
}

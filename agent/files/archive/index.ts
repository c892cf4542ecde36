// Archives: a directory as a tar, and a tar as a directory.
export { openPacker } from './pack.ts';
export { openUnpacker } from './unpack.ts';

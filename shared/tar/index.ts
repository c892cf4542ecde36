// Reads and writes tar archives and checks the names of their entries, for the agent and for `farhand files`.
export { type Bytes, bytes, fromText, toText } from './byte-names.ts';
export { encodeHeader, endOfArchive, paddingOf, type TarHeader } from './header.ts';
export { entryFault, readTar, type TarEntry } from './reader.ts';
export { assertInside, assertTarget, pathOfEntry } from './safe-names-and-symlinks.ts';
